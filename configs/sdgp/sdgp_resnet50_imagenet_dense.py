"""Dense ResNet-50 on ImageNet, 88 epochs: SDGP's baseline (SDGP Table I: 78.1 %)."""

_base_ = "../_base_/sdgp_imagenet.py"

model = dict(blur_pool=True, architecture=dict(name="resnet50"))
sparsity = dict(strategy="dense")

optim_wrapper = dict(optimizer=dict(lr=1.7, weight_decay=1e-4))
train_dataloader = dict(batch_size=512)
