// TableLocations against std::unordered_map: ids at the borders of ranges, close together, anywhere, and
// both, with locations that grow by bits and listings in between; prints bytes per row and times. Fails by
// abort.
#include "store/table_locations.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <unordered_map>

#include "common/tests/check.h"

using namespace tierstore;

namespace {

using Model = std::unordered_map<std::uint64_t, Location>;

void CheckEqual(TableLocations& index, const Model& model, std::size_t chunk) {
  CHECK(index.size() == model.size());
  std::vector<std::uint64_t> ids;
  std::vector<Location> locations, found(model.size());
  TableLocations::Listing listing;
  for (std::size_t before = 0; index.List(listing, chunk, ids, &locations); before = ids.size())
    CHECK(ids.size() - before <= chunk);
  CHECK(ids.size() == model.size());
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(model.at(ids[i]) == locations[i]);
  index.Find(ids.data(), ids.size(), found.data());
  CHECK(found == locations);
}

// A list that goes on while rows are put: what was there at its start comes once.
class SlowList {
 public:
  void Begin(const Model& model) {
    listing_ = {};
    listed_.clear();
    first_ = model;
  }
  void GoOn(TableLocations& index, const Model& model, std::size_t limit) {
    std::vector<std::uint64_t> ids;
    std::vector<Location> locations;
    const bool more = index.List(listing_, limit, ids, &locations);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK(model.at(ids[i]) == locations[i]);
      CHECK(listed_.emplace(ids[i], locations[i]).second);
    }
    if (more) return;
    for (const auto& [id, location] : first_) CHECK(listed_.contains(id));
    ++ends_;
    Begin(model);
  }
  std::size_t ends() const { return ends_; }

 private:
  TableLocations::Listing listing_;
  Model first_, listed_;
  std::size_t ends_ = 0;
};

// `draw` gives ids. The hash index shrinks and grows while ranges leave it.
template <class Draw>
void Random(Draw draw, int steps, const IndexForm& form) {
  TableLocations index(form);
  Model model;
  std::mt19937_64 random(static_cast<std::uint64_t>(steps));
  std::uint64_t ids[100];
  Location locations[100], previous[100];
  SlowList list;
  for (int step = 1; step <= steps; ++step) {
    const std::size_t n = 1 + random() % 100;
    const auto most = std::uint64_t{1} << std::min(40, 8 + step * 33 / steps);
    for (std::size_t i = 0; i < n; ++i) {
      ids[i] = draw(random);
      locations[i] = std::min(TableIndex::kMaxLocation, random() % most);
    }
    index.Put(ids, locations, n, previous);
    for (std::size_t i = 0; i < n; ++i) {
      const auto found = model.find(ids[i]);
      CHECK(previous[i] == (found == model.end() ? TableIndex::kAbsent : found->second));
      model[ids[i]] = locations[i];
    }
    list.GoOn(index, model, 1 + random() % 300);
    const std::uint64_t absent = draw(random);
    CHECK(index.Find(absent) == (model.contains(absent) ? model[absent] : TableIndex::kAbsent));
    if (step % (steps / 5) == 0) CheckEqual(index, model, 1 + random() % 1000);
  }
  CheckEqual(index, model, 777);
  CHECK(list.ends() > 0);
}

void Patterns(unsigned range_bits) {
  const std::uint64_t ids = std::uint64_t{1} << range_bits;
  for (const std::uint64_t from : {std::uint64_t{0}, std::uint64_t{1}, IndexForm::kNever}) {
    const IndexForm form{from == 1 ? 5 * ids : from, range_bits};
    Random([&](auto& random) { return random() % (20 * ids); }, 2000, form);
    Random([&](auto& random) { return kIdMask - random() % (20 * ids); }, 2000, form);
    Random([&](auto& random) { return random() >> 16; }, 2000, form);
    Random([&](auto& random) { return random() % 2 == 0 ? random() >> 16 : random() % (20 * ids); }, 3000,
           form);
    // Ranges of which about as many ids come as make them dense.
    Random([&](auto& random) { return random() % 40 * ids + random() % (ids / 2); }, 2000, form);
    // Neighbours in the hash index, so many that it takes an order of its own, alone and beside ranges.
    const auto crowd = [](std::uint64_t i) { return TableIndex::Unpermute(0x7777aaaa0000 + i % 60000); };
    Random([&](auto& random) { return crowd(random()); }, 2000, form);
    Random([&](auto& random) { return random() % 2 == 0 ? crowd(random()) : random() % (20 * ids); }, 3000,
           form);
    std::uint64_t next = 0;  // one after the other
    Random([&](auto&) { return next++ % (40 * ids); }, 2000, form);
  }
}

// Entries leave a hash index at any place.
void Erase() {
  TableIndex index;
  Model model;
  std::mt19937_64 random(1);
  for (int step = 0; step < 2000000; ++step) {
    const std::uint64_t id = random() % 50000;
    if (random() % 3 != 0 || index.IsGrowing()) {
      CHECK(index.Put(id, random() % 1000) == (model.contains(id) ? model[id] : TableIndex::kAbsent));
      model[id] = index.Find(id);
    } else {
      CHECK(index.Erase(id) == (model.contains(id) ? model[id] : TableIndex::kAbsent));
      model.erase(id);
    }
    CHECK(index.size() == model.size());
  }
  for (std::uint64_t id = 0; id < 50000; ++id)
    CHECK(index.Find(id) == (model.contains(id) ? model[id] : TableIndex::kAbsent));
}

// Of this thread's processor, since other work may share the machine.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// `n` ids from 0 on in random order, and found in another.
void Measure(std::size_t n, const IndexForm& form, const char* name) {
  TableLocations index(form);
  std::vector<std::uint64_t> order(n), ids(256);
  for (std::size_t i = 0; i < n; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  std::vector<Location> locations(256), previous(256);
  double slowest = 0, most_bytes = 0;
  const double start = CpuSeconds();
  for (std::size_t at = 0; at + 256 <= n; at += 256) {
    for (std::size_t i = 0; i < 256; ++i) locations[i] = at + i;
    const double before = CpuSeconds();
    index.Put(&order[at], locations.data(), 256, previous.data());
    slowest = std::max(slowest, CpuSeconds() - before);
    most_bytes = std::max(most_bytes, static_cast<double>(index.bytes()));
  }
  const double put = (CpuSeconds() - start) / static_cast<double>(n);
  std::mt19937_64 random(2);
  const double middle = CpuSeconds();
  std::size_t found = 0;
  for (std::size_t at = 0; at + 256 <= n; at += 256) {
    for (std::uint64_t& id : ids) id = random() % n;
    index.Find(ids.data(), 256, locations.data());
    for (const Location location : locations) found += location != TableIndex::kAbsent;
  }
  const double find = (CpuSeconds() - middle) / static_cast<double>(n);
  const auto rows = static_cast<double>(index.size());
  std::printf(
      "%s, %zu rows: %.2f bytes/row now, %.2f at most; put %.0f ns, find %.0f ns; slowest 256 puts %.1f ms\n",
      name, n, static_cast<double>(index.bytes()) / rows, most_bytes / rows, put * 1e9, find * 1e9,
      slowest * 1e3);
  CHECK(found + n % 256 * 2 + 256 >= n / 256 * 255);
}

}  // namespace

int main(int argc, char** argv) {
  Erase();
  for (const unsigned range_bits : {6u, 11u, 13u}) Patterns(range_bits);
  const std::size_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000000;
  Measure(n, {IndexForm::kNever, 16}, "hash");
  Measure(n, {0, 16}, "compact");
}
