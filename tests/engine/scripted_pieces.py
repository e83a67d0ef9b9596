"""The storages of scripted pipelines as bytes, for what is carried from one engine to another."""

import numpy as np


class EntryPieces:
    """The entries of a block: 8 bytes a token, 0 where none is stored."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.shape = f"{pipeline.block_tokens} entries"
        self.piece_bytes = 8 * pipeline.block_tokens

    def read(self, places, out):
        for place, row in zip(places, out.view(np.uint64), strict=True):
            row[:] = [self.pipeline.storage.get((place, offset), 0) for offset in range(self.pipeline.block_tokens)]

    def write(self, places, data):
        for place, row in zip(places, data.view(np.uint64).tolist(), strict=True):
            for offset, entry in enumerate(row):
                self.pipeline.storage[place, offset] = entry


class SnapshotPieces:
    """The snapshots of a recurrent pipeline, 8 bytes each."""

    shape = "a state"
    piece_bytes = 8

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def read(self, places, out):
        out.view(np.uint64)[:, 0] = [self.pipeline.snapshots[place] for place in places]

    def write(self, places, data):
        self.pipeline.snapshots.update(zip(places, data.view(np.uint64)[:, 0].tolist(), strict=True))
