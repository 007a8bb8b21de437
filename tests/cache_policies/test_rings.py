"""The rings below S3-FIFO and ARC against plain lists, where so much leaves out of turn that gaps close."""

from collections import namedtuple

import numpy as np
import pytest

from cache_policies import ghosts, queues


def state_of(arrays):
    return namedtuple("State", arrays)(**arrays)


@pytest.mark.parametrize("seed", range(4))
def test_queues_keep_the_order_of_arrival(seed):
    rng, capacity = np.random.default_rng(seed), 40
    s = state_of(queues.new_queues(capacity))
    model: list[list[int]] = [[], []]
    for _ in range(2000):
        free = [slot for slot in range(capacity) if slot not in model[0] and slot not in model[1]]
        rng.shuffle(free)
        for slot in free[: rng.integers(0, 8)]:
            queue = int(rng.integers(0, 2))
            queues.push(s, queue, np.int32(slot))
            model[queue].append(slot)
        for queue in range(2):
            for slot in [slot for slot in model[queue] if rng.random() < 0.05]:
                queues.drop(s, np.int32(slot))
                model[queue].remove(slot)
        walk(s, model, rng)
        assert s.length.tolist() == [len(model[0]), len(model[1])]
    assert [contents(s, 0), contents(s, 1)] == model


def walk(s, model, rng):
    """Takes, keeps and sends to the other queue's end what a walk finds, as long as it feels like it."""
    at = [0, 0]
    while rng.random() < 0.9:
        queue = int(rng.integers(0, 2))
        slot = queues.look(s, queue)
        if at[queue] == len(model[queue]):
            assert slot == queues.NO_SLOT
            continue
        assert slot == model[queue][at[queue]]
        what = rng.random()
        if what < 0.4:
            queues.keep(s, queue, slot)
            at[queue] += 1
        else:
            queues.take(s, queue, slot)
            model[queue].remove(slot)
        if what > 0.6:
            queues.push(s, 1, slot)
            model[1].append(int(slot))
    queues.finish(s)


def contents(s, queue):
    found = []
    while (slot := queues.look(s, queue)) != queues.NO_SLOT:
        found.append(int(slot))
        queues.keep(s, queue, slot)
    queues.finish(s)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("returning", [0.1, 0.9])
def test_ghosts_are_forgotten_in_order_of_age(seed, returning):
    rng, most, lists = np.random.default_rng(seed), 30, 2
    s = state_of(ghosts.new_ghosts(most, lists))
    model: list[list[int]] = [[], []]
    for key in range(3000):
        list_ = int(rng.random() < 0.3)
        if len(model[0]) + len(model[1]) == most:
            crowded = list_ if model[list_] else 1 - list_
            gone = model[crowded].pop(0)
            assert s.ghost_key[ghosts.oldest(s, crowded)] == gone
        ghosts.remember(s, np.uint64(key), list_)
        model[list_].append(key)
        if rng.random() < returning:
            list_ = int(rng.integers(0, 2)) if model[0] and model[1] else int(bool(model[1]))
            back = model[list_].pop(int(rng.integers(0, len(model[list_]))))
            ghost = ghosts.find(s, np.uint64(back))
            assert s.ghost_key[ghost] == back
            assert s.ghost_list[ghost] == list_
            ghosts.forget(s, ghost)
            assert ghosts.find(s, np.uint64(back)) == ghosts.NO_GHOST
        assert s.ghost_size.tolist() == [len(model[0]), len(model[1])]
    for list_, keys in enumerate(model):
        for key in keys:
            assert s.ghost_key[ghosts.oldest(s, list_)] == key
            ghosts.forget(s, ghosts.find(s, np.uint64(key)))
    assert not s.ghost_table.any()
