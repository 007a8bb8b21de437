// Binds the functions that kernels need beside rows (bindings/rows.cc): the transpose of a lookup, threads
// and instruction sets.
#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings/arrays.h"
#include "bindings/csr.h"
#include "bindings/host_rows.h"
#include "common/thread_pool.h"
#include "kernels/isa.h"

namespace py = pybind11;

namespace tierstore {
namespace {

py::tuple BindBuildCsr(const Array<std::int32_t>& inverse, std::int64_t num_unique) {
  Require(num_unique >= 0 && num_unique <= INT32_MAX, "num_unique must be between 0 and 2^31 - 1");
  Require(inverse.size() <= INT32_MAX, "more than 2^31 - 1 positions in one lookup");
  return Transposed({inverse.data(), static_cast<std::size_t>(inverse.size())}, {}, num_unique);
}

py::tuple BindBagOffsets(const std::vector<Array<std::int64_t>>& lengths) {
  py::ssize_t bags = 0;
  for (const auto& feature : lengths) bags += feature.size();
  Array<std::int64_t> offsets = Fresh<std::int64_t>(bags + 1);
  Array<std::int64_t> start = Fresh<std::int64_t>(static_cast<py::ssize_t>(lengths.size()) + 1);
  std::int64_t *offset = offsets.mutable_data(), *first = start.mutable_data();
  *offset = *first = 0;
  for (const auto& feature : lengths) {
    for (py::ssize_t bag = 0; bag < feature.size(); ++bag, ++offset)
      offset[1] = *offset + feature.data()[bag];
    first[1] = *first + feature.size();
    ++first;
  }
  return py::make_tuple(offsets, start);
}

py::tuple BindLongRows(const Array<std::int32_t>& start, std::int32_t few, std::int32_t piece) {
  Require(start.size() > 0 && few >= 0 && piece > 0, "start is empty, or a limit is not positive");
  LongRows found;
  {
    const py::gil_scoped_release unlocked;
    found = FindLongRows({start.data(), static_cast<std::size_t>(start.size())}, few, piece);
  }
  return py::make_tuple(Owned(std::move(found.hot)), Owned(std::move(found.others)),
                        Owned(std::move(found.first_piece)));
}

constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

void ForceIsaByName(const std::string& name) {
  if (name == "auto") return ForceIsa(BestIsa());
  for (int i = 0; i < 3; ++i) {
    if (name == kIsaNames[i]) return ForceIsa(static_cast<Isa>(i));
  }
  throw std::invalid_argument("isa must be 'auto', 'baseline', 'avx2' or 'avx512'");
}

std::vector<std::string> SupportedIsas() { return {kIsaNames, kIsaNames + static_cast<int>(BestIsa()) + 1}; }

void CopyBytes(const py::array& source, Array<std::uint8_t>& target) {
  const auto size = static_cast<std::int64_t>(source.nbytes());
  if (size != target.size() || !(source.flags() & py::array::c_style))
    throw std::invalid_argument("source and target must be contiguous and of the same size");
  constexpr std::int64_t kPiece = std::int64_t{1} << 18;
  const auto* const from = static_cast<const unsigned char*>(source.data());
  std::uint8_t* const to = target.mutable_data();
  if (size <= kPiece) {
    std::memcpy(to, from, static_cast<std::size_t>(size));
    return;
  }
  const py::gil_scoped_release unlocked;
  ParallelFor(0, size, kPiece, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

TIERSTORE_BINDINGS(kernels) {
  m.def("build_csr", &BindBuildCsr, py::arg("inverse").noconvert(), py::arg("num_unique"),
        "Return (start int32[num_unique + 1], positions int32[m]): the positions of every unique row, "
        "ascending. Entries of inverse (int32[n]) below 0 are left out.");
  m.def(
      "long_rows", &BindLongRows, py::arg("start"), py::arg("few"), py::arg("piece"),
      "Return the rows (int32) with more than `piece` positions, the other rows with more than `few`, and "
      "where each of the first begins if its positions are counted in pieces of `piece`, with the end of the "
      "last. start (int32): where the positions of each row begin, and their end.");
  m.def(
      "bag_offsets", &BindBagOffsets, py::arg("lengths"),
      "Add up the lengths of each feature's bags (int64). Returns where every bag begins and the end of the "
      "last bag (int64[bags + 1]), and the number of every feature's first bag (int64[features + 1]).");

  m.def("copy_bytes", &CopyBytes, py::arg("source"), py::arg("target").noconvert(),
        "Copy an array to one of bytes (uint8) of the same size, by the threads of the pool.");

  m.def("num_threads", &NumThreads, "Return the number of threads that one kernel may use.");
  m.def("set_num_threads", &SetNumThreads, py::arg("n"),
        "Let every kernel use at most n threads. Results do not depend on n.");
  m.def("limit_threads", &LimitThreads, py::arg("n"),
        "Let kernels that the calling thread starts use at most n threads; 0 ends the limit.");
  m.def("start_threads", &StartThreads,
        "Start the threads that kernels may use now: each has the niceness of the thread that starts it.");
  m.def(
      "isa", [] { return std::string(kIsaNames[static_cast<int>(ActiveIsa())]); },
      "Return the instruction set in use: 'baseline', 'avx2' or 'avx512'.");
  m.def("supported_isas", &SupportedIsas, "Return the instruction sets that this CPU has.");
  m.def("force_isa", &ForceIsaByName, py::arg("name"),
        "Use this instruction set, for tests; 'auto' uses the best one.");
}

}  // namespace tierstore
