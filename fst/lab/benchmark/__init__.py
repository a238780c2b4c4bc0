"""Side-by-side timing of layers, GEMM by GEMM, of training steps and of inference: `fst bench`.

Everything that is compared is timed in one run, in turns, in both orders; a result is a ratio of
medians.
"""
