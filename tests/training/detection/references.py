"""mmcv's operators written down literally: slow, and sharing no code with them."""

import math
from fractions import Fraction

import torch


def iou(a, b, offset=0):
    """Exact for exact numbers; None where both boxes are empty."""
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    union = sum(areas) - width * height
    return None if union == 0 else width * height / union


def nms(boxes, scores, threshold, offset=0):
    """Indices that stay, best first; earlier ones first among equal scores. In rationals."""
    boxes = [[Fraction(x) for x in box] for box in boxes]
    threshold = Fraction(str(threshold))
    kept = []
    for index in sorted(range(len(boxes)), key=lambda i: (-scores[i], i)):
        overlaps = [iou(boxes[k], boxes[index], offset) for k in kept]
        if not any(overlap is not None and overlap > threshold for overlap in overlaps):
            kept.append(index)
    return kept


def bilinear(image, y, x):
    """Value of (c, h, w) at a point; 0 beyond one pixel outside."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros_like(image[:, 0, 0])
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    v, u = y - top, x - left
    upper = image[:, top, left] * (1 - u) + image[:, top, right] * u
    lower = image[:, bottom, left] * (1 - u) + image[:, bottom, right] * u
    return upper * (1 - v) + lower * v


def roi_align(features, rois, size, scale, sampling_ratio, aligned):
    """Means of samples in each bin of each region: (r, c, *size), differentiable in features."""
    height, width = size
    pooled = []
    for index, *corners in rois.tolist():
        x1, y1, x2, y2 = (scale * c - (0.5 if aligned else 0) for c in corners)
        w, h = x2 - x1, y2 - y1
        if not aligned:
            w, h = max(w, 1.0), max(h, 1.0)
        rows = sampling_ratio or math.ceil(h / height)
        columns = sampling_ratio or math.ceil(w / width)
        for i in range(height):
            for j in range(width):
                total = torch.zeros_like(features[0, :, 0, 0])
                for a in range(rows):
                    for b in range(columns):
                        y = y1 + (i + (a + 0.5) / rows) * h / height
                        x = x1 + (j + (b + 0.5) / columns) * w / width
                        total = total + bilinear(features[int(index)], y, x)
                pooled.append(total / max(rows * columns, 1))
    channels = features.shape[1]
    if not pooled:
        return features.new_zeros(0, channels, height, width)
    return torch.stack(pooled).view(len(rois), height, width, channels).permute(0, 3, 1, 2)
