"""The main job on real input: train, be killed, resume, branch. Run it with `make demo`."""
