#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/machine.h"
#include "runtime/base/processor.h"
#include "runtime/base/when_idle.h"
#include "runtime/ranks/ranks.h"
#include "runtime/runtime.h"
#include "server/base/log.h"
#include "server/daemon/command_line.h"
#include "server/daemon/config.h"
#include "server/daemon/freed_memory.h"
#include "server/daemon/loader.h"
#include "server/daemon/rank_processes.h"
#include "server/daemon/serve.h"
#include "server/daemon/stop_signals.h"
#include "server/daemon/version.h"

// epikvd: reads the command line, then serves.

namespace epikv {
namespace {

// The life of another rank of --tensor_parallel. Rank 0 says why all have ended.
int RunRank(const v1::ServerConfig& settled, std::shared_ptr<Ranks> ranks) {
  const Config config = ConfigOf(settled);
  absl::Status status = LimitProcessor(config.processor);
  if (status.ok()) status = ServeAsRank(config, std::move(ranks));
  return status.ok() ? 0 : 1;
}

int Main(const std::vector<std::string>& args) {
  // Services say themselves what is wrong with a request; config.cc what is wrong with a file.
  google::protobuf::SetLogHandler(nullptr);
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (!command.ok()) {
    WriteToStderr(absl::StrCat("epikvd: ", command.status().message(), "\n"));
    return 1;
  }
  if (const auto* help = std::get_if<PrintHelp>(&*command)) {
    std::cout << help->text << std::flush;
    return 0;
  }
  if (std::holds_alternative<PrintVersion>(*command)) {
    std::cout << VersionText() << std::endl;
    return 0;
  }
  if (const auto* print = std::get_if<PrintConfig>(&*command)) {
    std::cout << print->text << std::flush;
    return 0;
  }
  BoundKernelCaches();
  v1::ServerConfig config = std::get<Run>(*command).config;
  std::optional<RankProcesses> ranks;  // before any thread
  if (config.tensor_parallel() > 1) {
    if (config.threads() == 0) {  // as long as all cores are everybody's
      config.set_threads(std::max<int64_t>(1, (CpuQuota() - 1) / config.tensor_parallel()));
    }
    ranks.emplace(static_cast<int>(config.tensor_parallel()),
                  [&](std::shared_ptr<Ranks> own) { return RunRank(config, std::move(own)); });
  }
  static StopSignals signals;  // its thread outlives main
  const absl::Status status = Serve(config, signals, ranks.has_value() ? &*ranks : nullptr);
  if (status.ok()) return 0;
  WriteToStderr(absl::StrCat("epikvd: ", status.message(), "\n"));
  return 1;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  epikv::ReturnFreedMemory(absl::ZeroDuration());
  epikv::WhenIdle::Set(epikv::ReturnFreedMemoryOfThread);
  const int status = epikv::Main({argv + 1, argv + argc});
  // All has ended in order. LibTorch's static destructors would take another second, while the
  // threads of /metrics still answer.
  std::_Exit(status);
}
