"""ASFP: up to 30 % of the filters zeroed after each epoch; downsampling shortcuts stay whole.

FST's Table 3 lists it among what does not start from scratch: load a trained dense network.
"""

sparsity = dict(strategy="asfp", exclude="*downsample*")
