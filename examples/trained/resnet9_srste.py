"""What trained resnet9_srste.pth: a narrow ResNet-9, 10,000 images of CIFAR-10, 10 epochs, seed 0."""

_base_ = "fst::configs/cifar10_subset.py"

sparsity = dict(_delete_=True, strategy="srste")
randomness = dict(seed=0)
