"""The oracle: what every rule and every GEMM means, literally, in slow float64; the tests' own."""
