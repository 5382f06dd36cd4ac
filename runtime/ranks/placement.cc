#include "runtime/ranks/placement.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace epikv {
namespace {

std::vector<int> ReadList(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return CpusOfList(line);
}

}  // namespace

std::vector<int> CpusOfList(absl::string_view list) {
  std::vector<int> cpus;
  for (const absl::string_view part : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last >= CPU_SETSIZE) {
      return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> CpusOfRank(absl::Span<const std::vector<int>> nodes, absl::Span<const int> allowed,
                            int rank, int size) {
  const int count = static_cast<int>(nodes.size());
  std::vector<int> cpus;
  if (count < size) return cpus;
  for (int node = rank * count / size; node < (rank + 1) * count / size; ++node) {
    for (const int cpu : nodes[node]) {
      if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) cpus.push_back(cpu);
    }
  }
  return cpus;
}

void PlaceRank(int rank, int size) {
  const std::string folder = "/sys/devices/system/node";
  std::vector<std::vector<int>> nodes;
  for (const int node : ReadList(absl::StrCat(folder, "/has_cpu"))) {
    nodes.push_back(ReadList(absl::StrCat(folder, "/node", node, "/cpulist")));
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return;
  std::vector<int> allowed;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) allowed.push_back(cpu);
  }
  const std::vector<int> cpus = CpusOfRank(nodes, allowed, rank, size);
  if (cpus.empty()) return;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace epikv
