"""Detection: data in COCO's format (coco, batches, scenes), Mask R-CNN on an encoder (pyramid, detector), its training,
and its average precision."""
