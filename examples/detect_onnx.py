"""Detections of an exported detector: python examples/detect_onnx.py model.onnx image.jpg

`fst export CONFIG CHECKPOINT model.onnx --size 192` writes the file, with all that `decode` needs
in its metadata. `decode` needs NumPy alone; onnxruntime runs the file, and Pillow reads the image.
"""

import json
import sys

import numpy as np


def decode(outputs, metadata, size, score_thr=0.3, iou_thr=0.45):
    """Detections in one image.

    Args:
        outputs: the file's outputs for one image: scores_0, scores_1, ..., boxes_0, boxes_1, ...,
            each (1, C, H, W).
        metadata: the file's metadata, parsed.
        size: width and height of the network's input, in pixels.
        score_thr: detections of a lower score are left out.
        iou_thr: of two boxes of one class that overlap by more than this, the better one stays.

    Returns:
        boxes (n, 4) as x1, y1, x2, y2 in pixels of the input, scores (n,), classes (n,); the best
        come first.
    """
    levels = len(outputs) // 2
    boxes, scores = [], []
    for level in range(levels):
        anchors = np.array(metadata["anchors"][level], np.float32)
        positions = _positions(outputs[level].shape[2:], metadata["strides"][level])
        anchors = (positions[:, None] + anchors).reshape(-1, 4)
        scores.append(_rows(outputs[level], len(anchors)))
        boxes.append(_decoded(_rows(outputs[levels + level], len(anchors)), anchors, metadata))
    boxes, scores = np.concatenate(boxes), np.concatenate(scores)
    if metadata["scores"] == "softmax":
        scores = np.exp(scores - scores.max(1, keepdims=True))
        scores = (scores / scores.sum(1, keepdims=True))[:, :-1]  # the last one is the background
    else:
        scores = 1 / (1 + np.exp(-scores))
    boxes = np.clip(boxes, 0, np.tile(np.float32(size), 2))
    places, classes = np.nonzero(scores > score_thr)
    boxes, scores = boxes[places], scores[places, classes]
    order = np.argsort(-scores, kind="stable")
    boxes, scores, classes = boxes[order], scores[order], classes[order]
    kept = _suppressed(boxes, classes, iou_thr)
    return boxes[kept], scores[kept], classes[kept]


def _positions(shape, stride):
    """The shift of the anchors at each position of a map: (H * W, 4)."""
    y, x = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    x, y = x.ravel() * stride[0], y.ravel() * stride[1]
    return np.stack([x, y, x, y], 1).astype(np.float32)


def _rows(output, anchors):
    """(1, A * K, H, W) as (H * W * A, K): one row for each anchor."""
    return output[0].transpose(1, 2, 0).reshape(anchors, -1)


def _decoded(boxes, anchors, metadata):
    boxes = boxes * np.float32(metadata["box_stds"]) + np.float32(metadata["box_means"])
    sides = anchors[:, 2:] - anchors[:, :2]
    centre = (anchors[:, :2] + anchors[:, 2:]) / 2 + sides * boxes[:, :2]
    most = np.float32(abs(np.log(16 / 1000)))  # a box grows by at most this factor, as in training
    half = sides * np.exp(np.clip(boxes[:, 2:], -most, most)) / 2
    return np.concatenate([centre - half, centre + half], 1)


def _suppressed(boxes, classes, iou_thr):
    """Non-maximum suppression within each class; the boxes are ordered, best first."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    for i in range(len(boxes)):
        low = np.maximum(boxes[i, :2], boxes[kept, :2])
        high = np.minimum(boxes[i, 2:], boxes[kept, 2:])
        common = np.clip(high - low, 0, None).prod(1)
        iou = common / np.maximum(area[i] + area[kept] - common, 1e-9)
        if not np.any((iou > iou_thr) & (classes[kept] == classes[i])):
            kept.append(i)
    return np.array(kept, int)


def main(file, picture):
    """Print what the file finds in an image."""
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    properties = session.get_modelmeta().custom_metadata_map
    metadata = {key: json.loads(value) for key, value in properties.items()}
    (entry,) = session.get_inputs()
    height, width = entry.shape[2:]
    image = Image.open(picture).convert("RGB")
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
    if metadata["channels"] == "BGR":
        pixels = pixels[..., ::-1]
    pixels = (pixels - np.float32(metadata["mean"])) / np.float32(metadata["std"])
    outputs = session.run(None, {entry.name: pixels.transpose(2, 0, 1)[None]})
    scale = np.tile([image.width / width, image.height / height], 2)
    for box, score, label in zip(*decode(outputs, metadata, (width, height)), strict=True):
        corners = " ".join(f"{side:.0f}" for side in box * scale)
        print(f"{metadata['classes'][label]} {score:.2f}: {corners}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
