"""A data set in COCO's layout below `data_root`: one JSON file per split, images in one folder."""

_base_ = "loaders.py"

data_root = "data/bccd"
classes = "auto"  # all categories of the training annotations, in file order; or a list of names

images = dict(img="JPEGImages")
train_dataloader = dict(
    dataset=dict(type="CocoDataset", ann_file="train.json", data_prefix=images),
)
val_dataloader = dict(
    dataset=dict(type="CocoDataset", ann_file="val.json", data_prefix=images),
)
test_dataloader = dict(
    dataset=dict(type="CocoDataset", ann_file="test.json", data_prefix=images),
)
val_evaluator = dict(type="CocoMetric", metric="bbox")  # without ann_file: the data set's
test_evaluator = val_evaluator
