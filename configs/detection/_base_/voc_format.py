"""A data set in Pascal VOC's layout below `data_root`:

JPEGImages/<name>.jpg, Annotations/<name>.xml, ImageSets/Main/<split>.txt
"""

_base_ = "loaders.py"

data_root = "data/bccd"
classes = "auto"  # all names in the training annotations, sorted; or a list of names

below = dict(sub_data_root="")
train_dataloader = dict(
    dataset=dict(type="XMLDataset", ann_file="ImageSets/Main/train.txt", data_prefix=below),
)
val_dataloader = dict(
    dataset=dict(type="XMLDataset", ann_file="ImageSets/Main/val.txt", data_prefix=below),
)
test_dataloader = dict(
    dataset=dict(type="XMLDataset", ann_file="ImageSets/Main/test.txt", data_prefix=below),
)
val_evaluator = dict(type="VOCMetric", metric="mAP", eval_mode="area")
test_evaluator = val_evaluator
