"""NumPy versions of the kernels of the native core, written for plainness.

They round in the same order, so that results can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore import _core as core

F32 = np.float32
REDUCE_POSITIONS = 256
SUM, MEAN, MAX = 0, 1, 2


def philox(c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10 of counters (c0, c1, c2, 0): uint32 (n,) each -> uint32 (n, 4)."""
    return philox_of([c0, c1, c2, np.zeros_like(c0)], seed)


def philox_of(counters: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Philox4x32-10 of four words of counters, uint32 (n,) each -> uint32 (n, 4)."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    x = [np.asarray(c, np.uint64) for c in counters]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (p1 >> shift) ^ x[1] ^ np.uint64(k0),
            p1 & mask,
            (p0 >> shift) ^ x[3] ^ np.uint64(k1),
            p0 & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(x, axis=1).astype(np.uint32)


def portable_log(x: np.ndarray) -> np.ndarray:
    m, exponent = np.frexp(x)
    low = m < 0.70710678118654752440
    m = np.where(low, m + m, m)
    exponent = np.where(low, exponent - 1, exponent).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = np.full_like(z, 1.0 / 21.0)
    for k in range(19, 0, -2):
        series = series * z + 1.0 / k
    return exponent * 0.69314718055994530942 + (s + s) * series


AS241 = {
    "a": "3.3871328727963666080e0 1.3314166789178437745e+2 1.9715909503065514427e+3 "
    "1.3731693765509461125e+4 4.5921953931549871457e+4 6.7265770927008700853e+4 "
    "3.3430575583588128105e+4 2.5090809287301226727e+3",
    "b": "1.0 4.2313330701600911252e+1 6.8718700749205790830e+2 "
    "5.3941960214247511077e+3 2.1213794301586595867e+4 3.9307895800092710610e+4 "
    "2.8729085735721942674e+4 5.2264952788528545610e+3",
    "c": "1.42343711074968357734e0 4.63033784615654529590e0 5.76949722146069140550e0 "
    "3.64784832476320460504e0 1.27045825245236838258e0 2.41780725177450611770e-1 "
    "2.27238449892691845833e-2 7.74545014278341407640e-4",
    "d": "1.0 2.05319162663775882187e0 1.67638483018380384940e0 "
    "6.89767334985100004550e-1 1.48103976427480074590e-1 1.51986665636164571966e-2 "
    "5.47593808499534494600e-4 1.05075007164441684324e-9",
}


def polynomial(name: str, x: np.ndarray) -> np.ndarray:
    coefficients = [float(c) for c in AS241[name].split()]
    value = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        value = value * x + c
    return value


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """Inverse of the standard normal distribution function (AS 241, PPND16), float64, for 1.4e-11 < p < 1."""
    q = p - 0.5
    r = 0.425 * 0.425 - q * q
    central = q * polynomial("a", r) / polynomial("b", r)
    r = np.sqrt(-portable_log(np.where(q < 0, p, 1.0 - p))) - 1.6
    tail = polynomial("c", r) / polynomial("d", r)
    return np.where(np.abs(q) <= 0.425, central, np.where(q < 0, -tail, tail))


def initial_weights(ids: np.ndarray, dim: int, kind: int, a: float, b: float, seed: int) -> np.ndarray:
    """float32 (n, dim) initial weights of ids (uint64) of one table."""
    a, b = F32(a), F32(b)
    ids = np.asarray(ids, np.uint64)
    if kind == 0:
        return np.full((len(ids), dim), a, F32)
    blocks = (dim + 3) // 4
    every = np.repeat(ids, blocks)
    words = philox(
        every & np.uint64(0xFFFFFFFF), every >> np.uint64(32), np.tile(np.arange(blocks), len(ids)), seed
    )
    x = words.reshape(len(ids), 4 * blocks)[:, :dim]
    if kind == 1:
        below = np.nextafter(b, a) if a < b else a
        u = (x >> np.uint32(8)).astype(F32) * F32(2.0**-24)
        return np.minimum(a + u * F32(b - a), below)
    z = normal_quantile((x.astype(np.float64) + 0.5) * 2.0**-32)
    return (np.float64(a) + np.float64(b) * z).astype(F32)


@dataclass
class Batch:
    """Arguments that the pooled kernels share; the output is one float32 buffer."""

    slots: np.ndarray
    inverse: np.ndarray
    offsets: np.ndarray
    bag_start: np.ndarray
    out_offset: np.ndarray
    out_stride: np.ndarray
    modes: np.ndarray
    weights: np.ndarray | None = None
    csr: tuple[np.ndarray, np.ndarray] = field(default_factory=tuple)  # type: ignore[assignment]

    @property
    def bags(self) -> core.Bags:
        return core.Bags(
            offsets=self.offsets, bag_start=self.bag_start, out_offset=self.out_offset,
            out_stride=self.out_stride, modes=self.modes,
        )  # fmt: skip

    def lookup_args(self, dim: int) -> core.LookupArgs:
        return core.LookupArgs(dim=dim, slots=self.slots, inverse=self.inverse)

    def update_args(self, dim: int, step: Step, check_finite: bool = False) -> core.UpdateArgs:
        start, positions = self.csr
        return core.UpdateArgs(
            dim=dim, slots=self.slots, csr_start=start, csr_positions=positions,
            step=step.native(), check_finite=check_finite,
        )  # fmt: skip

    @property
    def num_bags(self) -> int:
        return len(self.offsets) - 1

    def feature(self, bag: int) -> int:
        return int(np.searchsorted(self.bag_start, bag, side="right")) - 1

    def output(self, bag: int, dim: int) -> slice:
        f = self.feature(bag)
        at = int(self.out_offset[f] + (bag - self.bag_start[f]) * self.out_stride[f])
        return slice(at, at + dim)

    def used(self, bag: int) -> list[int]:
        return [p for p in range(self.offsets[bag], self.offsets[bag + 1]) if self.inverse[p] >= 0]


def lookup_pooled(rows: np.ndarray, dim: int, batch: Batch, out: np.ndarray) -> np.ndarray:
    """Fills out; returns argmax int32 (num_bags, dim), -1 where it does not apply."""
    argmax = np.full((batch.num_bags, dim), -1, np.int32)
    for bag in range(batch.num_bags):
        mode = batch.modes[batch.feature(bag)]
        used = batch.used(bag)
        value = np.zeros(dim, F32)
        for p in used:
            x = rows[batch.slots[batch.inverse[p]], :dim]
            if mode == MAX:
                better = (x > value) | np.isnan(x) | (argmax[bag] < 0)
                value = np.where(better, x, value)
                argmax[bag][better] = p
            else:
                value = value + (x if batch.weights is None else batch.weights[p] * x)
        if mode == MEAN and used:
            value = value / F32(len(used))
        out[batch.output(bag, dim)] = value
    return argmax


def tree_sum(products: np.ndarray) -> np.float32:
    """Sum of float32 (dim,) in the order of the 16 lanes."""
    lanes = np.zeros(16, F32)
    for c in range(0, len(products), 16):
        part = products[c : c + 16]
        lanes[: len(part)] += part
    width = 8
    while width:
        lanes[:width] += lanes[width : 2 * width]
        width //= 2
    return lanes[0]


def weight_grads(rows: np.ndarray, dim: int, batch: Batch, grad: np.ndarray) -> np.ndarray:
    out = np.zeros(len(batch.inverse), F32)
    for bag in range(batch.num_bags):
        mode = batch.modes[batch.feature(bag)]
        used = batch.used(bag)
        if mode == MAX:
            continue
        scale = F32(1) / F32(len(used)) if mode == MEAN and used else F32(1)
        for p in used:
            row = rows[batch.slots[batch.inverse[p]], :dim]
            out[p] = tree_sum(grad[batch.output(bag, dim)] * row) * scale
    return out


def position_grads(dim: int, batch: Batch, argmax: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """float32 (n, dim): every position's share of the gradient."""
    shares = np.zeros((len(batch.inverse), dim), F32)
    for bag in range(batch.num_bags):
        mode = batch.modes[batch.feature(bag)]
        used = batch.used(bag)
        g = grad[batch.output(bag, dim)]
        for p in used:
            if mode == MAX:
                shares[p] = np.where(argmax[bag] == p, g, F32(0))
                continue
            scale = F32(1) / F32(len(used)) if mode == MEAN else F32(1)
            if batch.weights is not None:
                scale = batch.weights[p] * scale
            shares[p] = scale * g
    return shares


def reduce_positions(shares: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Sum in order, in pieces of REDUCE_POSITIONS."""
    total = None
    for first in range(0, len(positions), REDUCE_POSITIONS):
        piece = np.zeros(shares.shape[1], F32)
        with np.errstate(invalid="ignore"):
            for p in positions[first : first + REDUCE_POSITIONS]:
                piece = piece + shares[p]
        total = piece if total is None else total + piece
    assert total is not None
    return total


ADAM, MOMENTUM, NESTEROV, LARS, LAMB, PARTIAL_ADAM, PARTIAL_LAMB = range(3, 10)
KINDS = range(10)
OWN_DECAY = (LARS, LAMB, PARTIAL_LAMB)


@dataclass(frozen=True)
class Step:
    """The arguments of core.OptimizerStep."""

    kind: int
    lr: float = 0.1
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    step: int = 1
    clip: tuple[float, float] | None = None
    """Limits of the norm and of the values of gradients."""
    keep_missed: float | None = None
    """Factor of the weights for each update that a row was not part of."""

    def native(self) -> core.OptimizerStep:
        own = dict(vars(self))
        clip, missed = own.pop("clip"), own.pop("keep_missed")
        step = core.OptimizerStep(**own)
        step = step if clip is None else step.clipped(*clip)
        return step if missed is None else step.decaying_all(missed)

    def clipped(self, g: np.ndarray) -> np.ndarray:
        limit, most = map(F32, self.clip or (np.inf, np.inf))
        g = np.where(g > most, most, np.where(g < -most, -most, g))
        factor = limit / (norm(g) + F32(1e-6))
        return g * factor if factor < 1 else g

    def state_floats(self, dim: int) -> int:
        own = (0, 1, dim, 2 * dim, dim, dim, dim, 2 * dim, dim + 1, dim + 1)[self.kind]
        return own + (self.keep_missed is not None)


def apply_step(step: Step, row: np.ndarray, dim: int, g: np.ndarray) -> None:
    """One update of a float32 row in place, rounded as the kernel does."""
    if step.keep_missed is not None:
        decay_missed(step, row, dim)
    g = step.clipped(g) if step.clip else g
    lr, eps = F32(step.lr), F32(step.eps)
    w, state = row[:dim], row[dim:]
    keep = F32(1.0 - step.lr * step.weight_decay) if step.weight_decay_mode == 2 else F32(1)
    if step.weight_decay_mode == 1 and step.weight_decay and step.kind not in OWN_DECAY:
        g = g + F32(step.weight_decay) * w
    if step.kind == 0:
        w[:] = keep * w - lr * g
    elif step.kind == 1:
        state[0] += tree_sum(g * g) / F32(dim)
        w[:] = keep * w - (lr / (np.sqrt(state[0]) + eps)) * g
    elif step.kind == 2:
        s = state[:dim]
        s += g * g
        w[:] = keep * w - lr * g / (np.sqrt(s) + eps)
    elif step.kind in (MOMENTUM, NESTEROV):
        m, beta = state[:dim], F32(step.beta1)
        m[:] = beta * m + (F32(1) if step.step == 1 else F32(1.0 - step.beta2)) * g
        w[:] = keep * w - lr * (g + beta * m if step.kind == NESTEROV else m)
    elif step.kind == LARS:
        m, decay, weights = state[:dim], F32(step.weight_decay), norm(w)
        rate = lr * norm_ratio(weights, norm(g) + decay * weights)
        m[:] = F32(step.beta1) * m + rate * (g + decay * w)
        w[:] = w - m
    else:
        apply_adam(step, w, state, keep, g)


def decay_missed(step: Step, row: np.ndarray, dim: int) -> None:
    at = dim + step.state_floats(dim) - 1
    factor, keep, left = 1.0, step.keep_missed, step.step - int(row[at]) - 1
    while left > 0:
        if left % 2:
            factor *= keep
        keep, left = keep * keep, left // 2
    row[:dim] *= F32(factor)
    row[at] = F32(step.step)


def norm(x: np.ndarray) -> np.float32:
    return np.sqrt(tree_sum(x * x))


def norm_ratio(above: np.float32, below: np.float32) -> np.float32:
    return above / below if above > 0 and below > 0 else F32(1)


def apply_adam(step: Step, w: np.ndarray, state: np.ndarray, keep: np.float32, g: np.ndarray) -> None:
    """Adam, Lamb, and their partially row-wise forms."""
    dim, is_lamb = len(w), step.kind in (LAMB, PARTIAL_LAMB)
    m, v = state[:dim], state[dim:]
    m[:] = F32(step.beta1) * m + F32(1.0 - step.beta1) * g
    rate = F32((1.0 if is_lamb else step.lr) / (1.0 - step.beta1**step.step))
    inv = F32(1.0 / np.sqrt(1.0 - step.beta2**step.step))
    if step.kind in (ADAM, LAMB):
        v = v[:dim]
        v[:] = F32(step.beta2) * v + F32(1.0 - step.beta2) * (g * g)
        change = rate * m / (np.sqrt(v) * inv + F32(step.eps))
    else:
        v[0] = F32(step.beta2) * v[0] + F32(1.0 - step.beta2) * (tree_sum(g * g) / F32(dim))
        change = (rate / (np.sqrt(v[0]) * inv + F32(step.eps))) * m
    if is_lamb:
        change = change + F32(step.weight_decay) * w
        w[:] = w - (F32(step.lr) * norm_ratio(norm(w), norm(change))) * change
    else:
        w[:] = keep * w - change


def update(
    rows: np.ndarray, dim: int, batch: Batch, shares: np.ndarray, step: Step, check_finite: bool
) -> list[int]:
    rejected = []
    for u, slot in enumerate(batch.slots):
        positions = np.flatnonzero(batch.inverse == u)
        if not len(positions):
            continue
        g = reduce_positions(shares, positions)
        if check_finite and not np.isfinite(g).all():
            rejected.append(u)
            continue
        apply_step(step, rows[slot], dim, g)
    return rejected
