"""ASFP: up to 30 % of the filters zeroed after each epoch; ResNet-18 on CIFAR-10, 60 epochs.

Starts from the checkpoint of dense_resnet18_cifar10.py, as in FST's Table 3:
--cfg-options load_from=work_dirs/dense_resnet18_cifar10/epoch_60.pth
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/asfp.py"]

# A tenth of what trains from scratch, as the authors' scripts for trained networks have it.
optim_wrapper = dict(optimizer=dict(lr=0.01))
