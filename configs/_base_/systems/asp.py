"""ASP: the 2:4 mask of a trained dense network, frozen, and the network trained again."""

sparsity = dict(strategy="asp", from_scratch="error")
