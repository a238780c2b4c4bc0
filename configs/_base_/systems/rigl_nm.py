"""RigL within groups: 2:4 weights from start to end, connections dropped and grown."""

sparsity = dict(strategy="rigl", n=2, m=4)
