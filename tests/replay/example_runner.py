"""A small continuous-batching runner that owes nothing to vlbatch but five calls to `watch`."""

import numpy as np


class ToyRunner:
    """Keeps its batch the usual way: one list for each property, all indexed by row."""

    def __init__(self, watch):
        self.watch = watch
        self.ids, self.done, self.images, self.features = [], [], [], []

    def add(self, req_id, prompt_len, images):
        self.ids.append(req_id)
        self.done.append(0)
        self.images.append(images)
        self.features.append({})  # first token of an image -> its feature rows
        self.watch.admit(req_id, prompt_len=prompt_len, items=images)

    def tables(self):
        return [self.ids, self.done, self.images, self.features]

    def finish(self, req_id):
        """Fill the hole with the last row."""
        row = self.ids.index(req_id)
        for table in self.tables():
            table[row] = table[-1]
            table.pop()
        self.watch.left(req_id)

    def step(self, scheduled):
        """Compute so many tokens of each request."""
        self.watch.step(scheduled)
        order = [req_id for req_id in self.ids if req_id in scheduled]
        tokens, rows, positions = [], [], []
        for req_id in order:
            row, start = self.ids.index(req_id), len(positions)
            first = self.done[row]
            self.done[row] = stop = first + scheduled[req_id]
            for image in self.images[row]:
                a, b = max(first, image.offset), min(stop, image.stop)
                if a < b:
                    if image.offset not in self.features[row]:
                        self.features[row][image.offset] = self.encode(image)
                    tokens += range(start + a - first, start + b - first)
                    of_image = self.features[row][image.offset]
                    rows.append(of_image[a - image.offset : b - image.offset])
            positions += self.positions(self.images[row], stop)[first:]
        self.watch.gathered(
            order, tokens=tokens, features=rows, positions=np.transpose(positions)
        )  # and here the model would run

    def encode(self, image):
        """Stands for a vision tower: rows that only this image has."""
        seed = list(image.key.encode())
        features = np.random.default_rng(seed).standard_normal((image.length, 8))
        self.watch.encoded(image.key, features)
        return features

    def positions(self, images, stop):
        """Rotary positions of tokens [0, stop): text on the diagonal, images on their grid."""
        places, following, images = [], 0, {image.offset: image for image in images}
        while len(places) < stop:
            image = images.get(len(places))
            cells = np.ndindex(image.grid) if image else [(0, 0, 0)]
            places += [[following + side for side in cell] for cell in cells]
            following = max(map(max, places)) + 1
        return places[:stop]
