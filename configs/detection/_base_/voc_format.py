"""A data set in Pascal VOC's layout below `data_root`:

JPEGImages/<name>.jpg (or .png, ...), Annotations/<name>.xml, ImageSets/Main/<split>.txt
"""

_base_ = "loaders.py"

data_root = "data/bccd"
classes = "auto"  # all names in the training annotations, sorted; or a list of names

train_dataloader = dict(
    dataset=dict(type="VOCFormatDataset", ann_file="ImageSets/Main/train.txt"),
)
val_dataloader = dict(
    dataset=dict(type="VOCFormatDataset", ann_file="ImageSets/Main/val.txt"),
)
test_dataloader = dict(
    dataset=dict(type="VOCFormatDataset", ann_file="ImageSets/Main/test.txt"),
)
val_evaluator = dict(type="VOCMetric", metric="mAP", eval_mode="area")
test_evaluator = val_evaluator
