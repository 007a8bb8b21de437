// A deduplicated lookup of positions whose keys are sorted (cuda/sort.cuh): unique keys in order of first
// occurrence, the index of every position's key, and the positions of every key, ascending.
//
// Equal keys are a run of sorted keys, whose positions ascend, as the sort is stable. So the first position
// of a run is where its key occurs first, and the keys are numbered by adding up, over positions, how many
// runs have their first position before. The lengths of these runs, added up, are where the positions of a
// key begin. Every word is written by one thread.
#pragma once

#include "cuda/sort.cuh"

namespace tierstore::cuda {

// The lanes of a group of sorted keys at which a run begins, that of skipped positions included; `key`: this
// thread's. All threads of the warp must call it.
TIERSTORE_DEVICE unsigned BeginsOfRuns(const BatchArgs& a, int64_t i, int64_t end, uint32_t* key) {
  bool begins = false;
  *key = a.skipped;
  if (i < end) {
    *key = Load(a.sorted_keys + i);
    begins = i == 0 || Load(a.sorted_keys + i - 1) != *key;
  }
  return Ballot(begins);
}

// Finds the first and the last run that begin in each tile of sorted keys.
TIERSTORE_DEVICE void BatchRuns(const BatchArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int64_t first = a.n, last = -1;
    for (int64_t at = begin; at < end; at += kWarp) {
      uint32_t key;
      const unsigned begins = BeginsOfRuns(a, at + Lane(), end, &key);
      if (begins == 0) continue;
      if (first == a.n) first = at + FirstBit(begins);
      last = at + LastBit(begins);
    }
    if (Lane() != 0) return;
    Store(a.first_runs + tile, static_cast<int32_t>(first));
    Store(a.last_runs + tile, static_cast<int32_t>(last));
  });
}

// Where the first run behind a tile begins, n if none does; kWarp tiles at a time, as a run may have many.
TIERSTORE_DEVICE int32_t NextRun(const BatchArgs& a, int64_t tile) {
  const auto n = static_cast<int32_t>(a.n);
  for (int64_t next = tile + 1; next * kTile < a.n; next += kWarp) {
    const int32_t found = (next + Lane()) * kTile < a.n ? Load(a.first_runs + next + Lane()) : n;
    const unsigned with_run = Ballot(found < n);
    if (with_run != 0) return ShuffleFrom(found, FirstBit(with_run));
  }
  return n;
}

// Where the last run before a tile begins, which is the tile's own until its first begins.
TIERSTORE_DEVICE int32_t RunBefore(const BatchArgs& a, int64_t tile) {
  for (int64_t before = tile - 1; before >= 0; before -= kWarp) {
    const int32_t found = before >= Lane() ? Load(a.last_runs + before - Lane()) : -1;
    const unsigned with_run = Ballot(found >= 0);
    if (with_run != 0) return ShuffleFrom(found, FirstBit(with_run));
  }
  return 0;
}

// Gives the first position of each run its length, and other positions none.
TIERSTORE_DEVICE void BatchLengths(const BatchArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int32_t next = NextRun(a, tile);
    for (int64_t at = begin + (end - begin - 1) / kWarp * kWarp; at >= begin; at -= kWarp) {
      const int64_t i = at + Lane();
      uint32_t key;
      const unsigned begins = BeginsOfRuns(a, i, end, &key);
      const unsigned behind = begins & ~LanesBefore() & ~(1u << Lane());
      const int64_t run_end = behind != 0 ? at + FirstBit(behind) : next;
      const bool is_first = (begins >> Lane() & 1) != 0 && key != a.skipped;
      if (i < end)
        Store(a.firsts + Load(a.sorted_positions + i), static_cast<int32_t>(is_first ? run_end - i : 0));
      if (begins != 0) next = static_cast<int32_t>(at + FirstBit(begins));
    }
  });
}

// Adds up, for each tile of positions, the runs whose first positions these are, and their lengths.
TIERSTORE_DEVICE void BatchSums(const BatchArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int32_t runs = 0, positions = 0;
    for (int64_t i = begin + Lane(); i < end; i += kWarp) {
      const int32_t length = Load(a.firsts + i);
      runs += length > 0 ? 1 : 0;
      positions += length;
    }
    TIERSTORE_UNROLL
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      runs += ShuffleXor(runs, lanes);
      positions += ShuffleXor(positions, lanes);
    }
    if (Lane() != 0) return;
    Store(a.sums + tile, runs);
    Store(a.sums + a.stride + tile, positions);
  });
}

TIERSTORE_DEVICE uint64_t RowKey(const BatchArgs& a, uint32_t key) {
  int32_t table = 0, behind = a.num_tables;  // the table is not before the one and before the other
  while (behind - table > 1) {
    const int32_t middle = (table + behind) / 2;
    if (Load(a.bases + middle) <= key) {
      table = middle;
    } else {
      behind = middle;
    }
  }
  return static_cast<uint64_t>(Load(a.tables + table)) << 48 | (key - Load(a.bases + table));
}

// Numbers the keys by their first positions, and says where the positions of each key begin.
TIERSTORE_DEVICE void BatchUnique(const BatchArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int32_t rank = Load(a.sums + tile), start = Load(a.sums + a.stride + tile);
    for (int64_t at = begin; at < end; at += kWarp) {
      const int64_t i = at + Lane();
      const int32_t length = i < end ? Load(a.firsts + i) : 0;
      const unsigned firsts = Ballot(length > 0);
      const int32_t up_to = SumUpTo(length);
      if (length > 0) {
        const int32_t own = rank + CountBits(firsts & LanesBefore());
        Store(a.firsts + i, own);
        Store(a.csr_start + own, start + up_to - length);
        Store(a.unique + own, RowKey(a, Load(a.keys + i)));
      }
      rank += CountBits(firsts);
      start += ShuffleFrom(up_to, kWarp - 1);
    }
    if (tile == 0 && Lane() == 0) Store(a.csr_start + Load(a.totals), Load(a.totals + 1));
  });
}

// What the positions of a run need to know: its number, and its place among the positions of all keys less
// where it begins among sorted keys.
struct RunOfBatch {
  int32_t rank, shift;
};

TIERSTORE_DEVICE RunOfBatch RunAt(const BatchArgs& a, int64_t begin) {
  if (Load(a.sorted_keys + begin) == a.skipped) return {-1, 0};
  const int32_t rank = Load(a.firsts + Load(a.sorted_positions + begin));
  return {rank, Load(a.csr_start + rank) - static_cast<int32_t>(begin)};
}

// Places every position among those of its key.
TIERSTORE_DEVICE void BatchPositions(const BatchArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    RunOfBatch open = RunAt(a, RunBefore(a, tile));
    for (int64_t at = begin; at < end; at += kWarp) {
      const int64_t i = at + Lane();
      uint32_t key;
      const unsigned begins = BeginsOfRuns(a, i, end, &key);
      const bool is_first = (begins >> Lane() & 1) != 0;
      const RunOfBatch own = is_first ? RunAt(a, i) : open;
      const unsigned up_to = begins & (LanesBefore() | 1u << Lane());
      const int from = up_to != 0 ? LastBit(up_to) : Lane();
      const RunOfBatch run = {ShuffleFrom(own.rank, from), ShuffleFrom(own.shift, from)};
      if (i < end) {
        const int32_t position = Load(a.sorted_positions + i);
        Store(a.inverse + position, run.rank);
        if (run.rank >= 0) Store(a.csr_positions + run.shift + i, position);
      }
      open = {ShuffleFrom(run.rank, kWarp - 1), ShuffleFrom(run.shift, kWarp - 1)};
    }
  });
}

}  // namespace tierstore::cuda
