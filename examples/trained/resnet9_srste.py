"""The training of resnet9_srste.pth: 10 epochs on 10,000 images of CIFAR-10."""

_base_ = "fst::configs/cifar10_subset.py"

sparsity = dict(_delete_=True, strategy="srste")
randomness = dict(seed=0)
