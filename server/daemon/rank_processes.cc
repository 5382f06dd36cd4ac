#include "server/daemon/rank_processes.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/ranks/placement.h"

namespace epikv {
namespace {

// How a process ended; empty: well.
std::string EndOf(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrCat("was ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)),
                        ")");
  }
  if (WEXITSTATUS(status) == 0) return "";
  return absl::StrCat("ended with status ", WEXITSTATUS(status));
}

}  // namespace

RankProcesses::RankProcesses(int size, absl::FunctionRef<int(std::shared_ptr<Ranks>)> run) {
  const std::shared_ptr<RankMemory> memory = Ranks::Share(size);
  const pid_t parent = getpid();
  ranks_ = std::make_shared<Ranks>(memory, 0);
  for (int rank = 1; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) {
      ranks_->Fail(absl::StrCat("rank ", rank, " could not be begun: ", std::strerror(errno)));
      return;
    }
    if (pid > 0) {
      others_.push_back(pid);
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) std::_Exit(1);  // it had ended before
    prctl(PR_SET_NAME, absl::StrCat("epikvd rank ", rank).c_str());
    // Rank 0 says when to end. A terminal's Ctrl-C goes to all.
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) {
      std::signal(signal, SIG_IGN);
    }
    PlaceRank(rank, size);
    std::_Exit(run(std::make_shared<Ranks>(memory, rank)));
  }
  PlaceRank(0, size);
}

void RankProcesses::Watch(std::function<void(const std::string& why)> on_failure) {
  std::thread([ranks = ranks_, others = others_, on_failure = std::move(on_failure)] {
    bool told = false;
    for (size_t ended = 0; ended < others.size();) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, 0);  // this process has no other children
      if (pid < 0 && errno != EINTR) return;
      for (size_t i = 0; pid > 0 && i < others.size(); ++i) {
        if (others[i] != pid) continue;
        ++ended;
        const std::string end = EndOf(status);
        if (end.empty()) continue;
        ranks->Fail(absl::StrCat("rank ", i + 1, " (process ", pid, ") ", end));
        if (!std::exchange(told, true)) on_failure(ranks->failure());
      }
    }
  }).detach();
}

}  // namespace epikv
