"""ASFP: up to 30 % of the filters zeroed after each epoch in the end.

ResNet-18 on ImageNet, 120 epochs (FST Table 3: 68.0 %).

Starts from the checkpoint of dense_resnet18_imagenet.py, as in that table:
--cfg-options load_from=work_dirs/dense_resnet18_imagenet/epoch_120.pth
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/asfp.py"]

# A tenth of what trains from scratch, as the authors' scripts for trained networks have it.
optim_wrapper = dict(optimizer=dict(lr=0.01))
