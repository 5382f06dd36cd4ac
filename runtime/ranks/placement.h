#pragma once

#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace epikv {

// A list of CPUs as Linux writes it: "0-3,8" -> 0 1 2 3 8. What is no such list has none.
std::vector<int> CpusOfList(absl::string_view list);

// The CPUs that a rank runs on, of those that it may use: those of its share of the memory nodes,
// so that what it touches first lies near. nodes: CPUs of each node. Empty: there are fewer nodes
// than ranks, or no CPU of its share may be used; then it runs anywhere.
std::vector<int> CpusOfRank(absl::Span<const std::vector<int>> nodes, absl::Span<const int> allowed,
                            int rank, int size);

// Binds this process to CpusOfRank on this machine. Before it has threads, which inherit that.
void PlaceRank(int rank, int size);

}  // namespace epikv
