"""A 2:4 YOLO by Ultralytics. python ultralytics_yolo.py --data DATA.yaml

`fst.convert(yolo.model, ...)` before `yolo.train()` would train a dense network: Ultralytics builds
another one. A callback converts the network that is trained, and its average, which is saved.
"""

import argparse
import copy

import torch
from ultralytics import YOLO

import fst

TABLE = "*.dfl.conv"  # the numbers 0 to 15, by which boxes are decoded


def sparsify(trainer) -> None:
    """Callback `on_pretrain_routine_end`; one process, a strategy without a schedule."""
    print(fst.convert(trainer.model, "srste", exclude=[TABLE]))
    average = copy.deepcopy(trainer.model).eval().requires_grad_(False)
    average.load_state_dict(trainer.ema.ema.state_dict())
    trainer.ema.ema = average


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="coco8.yaml", help="as `yolo train data=`")
    parser.add_argument("--model", default="yolo11n.yaml", help="or trained weights, yolo11n.pt")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--out", default="yolo_2of4", help="prefix of the files that are written")
    options = parser.parse_args()
    yolo = YOLO(options.model)
    yolo.add_callback("on_pretrain_routine_end", sparsify)
    yolo.train(data=options.data, epochs=options.epochs, imgsz=options.size, plots=False)
    yolo.model = fst.fold(yolo.model)  # of best.pt: plain layers from here on, for val and export
    print(fst.verify(yolo.model, exclude=[TABLE]))
    yolo.save(f"{options.out}.pt")  # loads without FST
    file = YOLO(f"{options.out}.pt").export(format="onnx", imgsz=options.size, simplify=False)
    print(fst.verify(file, 2, 4, exclude=[TABLE]))
    images = torch.rand(1, 3, options.size, options.size)
    packed = fst.pack(yolo.model.float().eval(), images)  # for CPUs
    print(packed.report)  # its last lines say whether that is faster; ONNX Runtime may be
    torch.save(packed, f"{options.out}_packed.pt")
    print(f"written: {options.out}.pt, {file}, {options.out}_packed.pt")
