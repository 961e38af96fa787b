"""The recurrent expert: its sizes, its parameters, and what every backend of its forward pass computes.

Legend: d width, w width of the embedding and of the head, L blocks, T parameters of one expert, K candidates (weight
vectors), B windows, N bytes of the corpus. Vectors are rows: a product is `u W`.

For a window of bytes b_0, b_1, ... ("SOMA" body: Chaubard, Kochenderfer, Re 2026):

    e_0 = 0, e_t = E[b_{t-1}]                              E [256, w]
    x = e, or e project_in where w != d                    project_in [w, d]
    in each of L blocks:
        u = norm(x) gain1
        (i, f, g, o) = u wx + h wh                         wx, wh [d, 4d], in this order, d columns each
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(c)                             both zero before the window
        x = x + h
        x = x + gelu((norm(x) gain2) up) down              up [d, 4d], down [4d, d]
    y = norm(x) gain, or (norm(x) gain) project_out        project_out [d, w]
    p(b_t) = softmax(y E^T)[b_t]

norm(x) = (x - mean x) / sqrt(var x + EPSILON) over the d units; gelu(v) = v (1 + erf(v / sqrt 2)) / 2. The loss of a
window is the mean of -log p(b_t) over its bytes, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UserError

NUM_BYTES = 256
EPSILON = 1e-5


@dataclass(frozen=True)
class LstmShape:
    """Sizes of one expert, and where its parameters lie in the flat vector of T floats: role after role.

    Attributes:
        width: d.
        num_blocks: L >= 1.
        head_width: w; another than d adds `project_in` and `project_out`. None for d.
        train_embedding: whether E is among the parameters (role `embedding`), so that each candidate brings its own.

    Raises:
        UserError: a size is not one of these.
    """

    width: int
    num_blocks: int = 2
    head_width: int | None = None
    train_embedding: bool = False

    def __post_init__(self) -> None:
        for field, value in (("width", self.width), ("head_width", self.embedding_width)):
            if value < 1:
                raise UserError(f"{field}={value}: must be at least 1")
        if self.num_blocks < 1:
            raise UserError(f"num_blocks={self.num_blocks}: must be at least 1")

    @property
    def embedding_width(self) -> int:
        """w: columns of E."""
        return self.width if self.head_width is None else self.head_width

    @property
    def has_projections(self) -> bool:
        """Whether w differs from d."""
        return self.embedding_width != self.width

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by role, in the order in which they lie."""
        d, w = self.width, self.embedding_width
        roles: dict[str, tuple[int, ...]] = {}
        for block in range(self.num_blocks):
            roles[f"block{block}.wx"] = (d, 4 * d)
            roles[f"block{block}.wh"] = (d, 4 * d)
            roles[f"block{block}.gain1"] = (d,)
            roles[f"block{block}.up"] = (d, 4 * d)
            roles[f"block{block}.down"] = (4 * d, d)
            roles[f"block{block}.gain2"] = (d,)
        roles["gain"] = (d,)
        if self.has_projections:
            roles["project_in"] = (w, d)
            roles["project_out"] = (d, w)
        if self.train_embedding:
            roles["embedding"] = (NUM_BYTES, w)
        return roles

    @property
    def offsets(self) -> dict[str, int]:
        """Where each role begins in the flat vector."""
        offsets, position = {}, 0
        for role, shape in self.roles.items():
            offsets[role] = position
            position += int(np.prod(shape))
        return offsets

    @property
    def num_parameters(self) -> int:
        """T."""
        return sum(int(np.prod(shape)) for shape in self.roles.values())

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The roles inside flat vectors [..., T], as views with the same leading axes."""
        assert flat.shape[-1] == self.num_parameters, f"expected {self.num_parameters} parameters, got {flat.shape[-1]}"
        offsets, lead = self.offsets, flat.shape[:-1]
        return {
            role: flat[..., offsets[role] : offsets[role] + int(np.prod(shape))].reshape(*lead, *shape)
            for role, shape in self.roles.items()
        }

    def gain_mask(self) -> np.ndarray:
        """bool [T]: True on the gains of the norms."""
        mask = np.zeros(self.num_parameters, bool)
        for role, view in self.views(mask).items():
            view[...] = "gain" in role
        return mask


def check_windows(shape: LstmShape, embedding, text, starts, length: int, is_carried: bool) -> None:
    """Refuse what no backend can run.

    Args:
        shape: sizes of the expert.
        embedding: [256, w]; not looked at where it is trained.
        text: uint8 [N].
        starts: int [B], first byte of each window.
        length: bytes of a window.
        is_carried: whether windows continue from a state, and so need the byte before them.

    Raises:
        UserError: a window reaches out of the text, or the embedding has another shape.
    """
    expected = (NUM_BYTES, shape.embedding_width)
    if not shape.train_embedding and (embedding is None or embedding.shape != expected):
        got = None if embedding is None else embedding.shape
        raise UserError(f"embedding: expected shape {expected}, got {got}")
    if length < 1:
        raise UserError(f"length={length}: must be at least 1")
    assert text.dtype == np.uint8, f"expected uint8 text, got {text.dtype}"
    starts, lowest, highest = np.asarray(starts), int(is_carried), len(text) - length
    outside = starts[(starts < lowest) | (starts > highest)]
    if len(outside):
        raise UserError(f"starts: {outside[0]} lies outside [{lowest}, {highest}], text {len(text)}, length {length}")
