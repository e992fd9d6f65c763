"""Every fault that was reproduced in the peers (DCP 2.13, torchsnapshot), and what is so here instead."""
