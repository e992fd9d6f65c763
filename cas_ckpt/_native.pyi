from cas_ckpt.native import LeafDigests, ReadLeaves, WordSums

SIMD: str
leaf_digests: LeafDigests
read_leaves: ReadLeaves
word_sums: WordSums
