#include "server/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

namespace epikv {
namespace {

prometheus::MetricFamily One(const char* name, const char* help, prometheus::MetricType type,
                             double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return {.name = name, .help = help, .type = type, .metric = {metric}};
}

struct Memory {
  double virtual_bytes = 0, resident_bytes = 0;
};

Memory ReadMemory() {
  int64_t total_pages = 0, resident_pages = 0;
  std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
  const double page = static_cast<double>(sysconf(_SC_PAGESIZE));
  return {static_cast<double>(total_pages) * page, static_cast<double>(resident_pages) * page};
}

double MaxFds() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<double>(limit.rlim_cur);
}

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double CountEntries(const char* directory) {
  std::error_code error;
  double count = 0;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return count;
}

double StartTimeSeconds() {
  static const double start =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return start;
}

// Taken when the program starts, near enough.
const double kStart = StartTimeSeconds();

}  // namespace

std::vector<prometheus::MetricFamily> ProcessMetrics::Collect() const {
  using prometheus::MetricType;
  const Memory memory = ReadMemory();
  return {One("process_cpu_seconds_total", "User and system CPU time of the process.",
              MetricType::Counter, CpuSeconds()),
          One("process_resident_memory_bytes", "Resident memory.", MetricType::Gauge,
              memory.resident_bytes),
          One("process_virtual_memory_bytes", "Virtual memory.", MetricType::Gauge,
              memory.virtual_bytes),
          One("process_open_fds", "Open file descriptors.", MetricType::Gauge,
              CountEntries("/proc/self/fd")),
          One("process_max_fds", "Most file descriptors that the process may open.",
              MetricType::Gauge, MaxFds()),
          One("process_threads", "Threads.", MetricType::Gauge, CountEntries("/proc/self/task")),
          One("process_start_time_seconds", "Start time of the process, in seconds since 1970.",
              MetricType::Gauge, kStart)};
}

}  // namespace epikv
