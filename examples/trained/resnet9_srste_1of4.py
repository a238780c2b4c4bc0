"""The training of resnet9_srste_1of4.pth: 10 epochs on 10,000 images of CIFAR-10."""

_base_ = "fst::configs/cifar10_subset.py"

sparsity = dict(_delete_=True, strategy="srste", n=1, m=4)
randomness = dict(seed=0)
