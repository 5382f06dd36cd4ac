// The differential fuzzer (trial.h, play.h). Every trial runs in a process of its own, so that what
// ends the process is found like everything else; what is found is made as small as it gets.
//
//   differential [--seconds N] [--trials N] [--seed N] [--findings N] [--corpus DIR] [--answers
//   FILE] differential TRIAL.json ...     plays these
//
// --corpus: writes what is found there. --answers: appends whole answers, a line of JSON each, for
// against_transformers.py. Exits 1 if something was found.

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/laws/differential/play.h"
#include "tests/laws/differential/trial.h"

namespace epikv {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kSecondsATrial = 120;

// What came of a trial. kind: Finding::kind, or "crash", or "slow"; empty: nothing was found.
struct Verdict {
  std::string kind, what;
  Tally tally;
};

Json JsonOf(const Tally& t) {
  return {t.requests, t.refused, t.whole, t.cut, t.failed, t.tokens, t.rounds, t.ties};
}

Tally TallyOf(const Json& j) { return {j[0], j[1], j[2], j[3], j[4], j[5], j[6], j[7]}; }

void AppendAnswers(const std::vector<Answer>& answers, const std::string& path) {
  std::ofstream file(path, std::ios::app);
  for (const Answer& a : answers) {
    file << Json{{"model", a.model},
                 {"prompt", a.prompt},
                 {"tokens", a.tokens},
                 {"logprobs", a.logprobs},
                 {"evictions", a.evictions}}
         << "\n";
  }
}

// In this process.
Verdict PlayHere(const Trial& trial, const std::string& answers_path) {
  Verdict verdict;
  std::vector<Answer> answers;
  try {
    verdict.tally = PlayTrial(trial, answers_path.empty() ? nullptr : &answers);
    if (!answers_path.empty()) AppendAnswers(answers, answers_path);
  } catch (const Finding& finding) {
    verdict.kind = finding.kind();
    verdict.what = finding.what();
  } catch (const std::exception& e) {
    verdict.kind = "crash";
    verdict.what = absl::StrCat("an exception left the engine: ", e.what());
  }
  return verdict;
}

// In a process of its own.
Verdict PlayApart(const Trial& trial, const std::string& answers_path = "") {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child < 0) std::abort();
  if (child == 0) {
    close(ends[0]);
    if (!getenv("DIFF_DEBUG")) dup2(ends[1], STDERR_FILENO);
    alarm(kSecondsATrial);
    const Verdict verdict = PlayHere(trial, answers_path);
    const std::string line =
        absl::StrCat("\n", Json{verdict.kind, verdict.what, JsonOf(verdict.tally)}.dump(), "\n");
    const bool told = write(ends[1], line.data(), line.size()) == std::ssize(line);
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  std::string said;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    said.pop_back();
    const Json line = Json::parse(said.substr(said.rfind('\n') + 1));
    return {.kind = line[0], .what = line[1], .tally = TallyOf(line[2])};
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    return {.kind = "slow", .what = absl::StrCat("not over after ", kSecondsATrial, " s")};
  }
  const size_t most = 600;
  if (said.size() > most) said.erase(0, said.size() - most);
  return {.kind = "crash", .what = said};
}

// Smaller JSON ------------------------------------------------------------------------------

// Every way of making one place of the trial smaller: items left out, numbers halved or zero.
void Smaller(const Json& at, const std::function<void(Json)>& with) {
  if (at.is_array()) {
    for (size_t i = at.size(); i-- > 0;) {
      Json less = at;
      less.erase(less.begin() + static_cast<int64_t>(i));
      with(std::move(less));
    }
  } else if (at.is_object()) {
    for (const auto& [name, value] : at.items()) {
      Json less = at;
      less.erase(name);
      with(std::move(less));
    }
  } else if (at.is_number_integer() && at.get<int64_t>() > 1) {
    with(at.get<int64_t>() / 2);
    with(at.get<int64_t>() - 1);
  }
  if (!at.is_structured()) return;
  for (auto it = at.begin(); it != at.end(); ++it) {
    Smaller(*it, [&](Json less) {
      Json whole = at;
      if (at.is_object()) {
        whole[it.key()] = std::move(less);
      } else {
        whole[it - at.begin()] = std::move(less);
      }
      with(std::move(whole));
    });
  }
}

// The asks that stay when one goes still name the ones that they continue.
Json WithoutAsk(const Json& trial, int64_t gone) {
  Json less = trial;
  less["asks"].erase(less["asks"].begin() + gone);
  for (Json& ask : less["asks"]) {
    if (!ask.contains("continues")) continue;
    const auto other = ask["continues"].get<int64_t>();
    if (other == gone) ask.erase("continues");
    if (other > gone) ask["continues"] = other - 1;
  }
  return less;
}

std::optional<Trial> Read(const Json& json) {
  try {
    return TrialOf(json);
  } catch (const std::exception&) {
    return std::nullopt;  // too small to be one
  }
}

// The smallest trial found within the time that shows a finding of the same kind.
Json Minimise(Json trial, const std::string& kind, std::chrono::seconds most) {
  const auto end = Clock::now() + most;
  auto shows = [&](const Json& json) {
    if (Clock::now() > end) return false;
    const std::optional<Trial> smaller = Read(json);
    return smaller.has_value() && PlayApart(*smaller).kind == kind;
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (int64_t i = std::ssize(trial["asks"]); i-- > 0;) {
      if (Json less = WithoutAsk(trial, i); shows(less)) {
        trial = std::move(less);
        smaller = true;
      }
    }
    std::vector<Json> candidates;
    Smaller(trial, [&](Json less) { candidates.push_back(std::move(less)); });
    for (const Json& less : candidates) {
      if (!shows(less)) continue;
      trial = less;
      smaller = true;
      break;
    }
  }
  return trial;
}

struct Flags {
  int64_t seconds = 1800, trials = INT64_MAX, seed = 1, findings = 3, minimise_seconds = 120;
  std::string corpus, answers;
  std::vector<std::string> files;
};

Flags FlagsOf(int argc, char** argv) {
  Flags flags;
  const std::map<std::string, int64_t*> numbers = {{"--seconds", &flags.seconds},
                                                   {"--trials", &flags.trials},
                                                   {"--seed", &flags.seed},
                                                   {"--findings", &flags.findings},
                                                   {"--minimise_seconds", &flags.minimise_seconds}};
  const std::map<std::string, std::string*> texts = {{"--corpus", &flags.corpus},
                                                     {"--answers", &flags.answers}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool number = numbers.contains(name);
    if (!number && !texts.contains(name)) {
      if (name.starts_with("-")) {
        std::cerr << "unknown flag " << name << "\n";
        std::exit(2);
      }
      flags.files.push_back(name);
    } else if (i + 1 == argc || (number && !absl::SimpleAtoi(argv[i + 1], numbers.at(name)))) {
      std::cerr << name << " needs a " << (number ? "number" : "path") << "\n";
      std::exit(2);
    } else if (!number) {
      *texts.at(name) = argv[i + 1];
      ++i;
    } else {
      ++i;
    }
  }
  return flags;
}

int PlayFiles(const Flags& flags) {
  int found = 0;
  for (const std::string& path : flags.files) {
    std::ifstream file(path);
    const Verdict verdict = PlayApart(TrialOf(Json::parse(file)), flags.answers);
    std::cout << path << ": "
              << (verdict.kind.empty() ? verdict.tally.ToString()
                                       : absl::StrCat(verdict.kind, ": ", verdict.what))
              << std::endl;
    found += !verdict.kind.empty();
  }
  return found > 0;
}

int Fuzz(const Flags& flags) {
  const auto begin = Clock::now();
  const auto end = begin + std::chrono::seconds(flags.seconds);
  auto told = begin;
  Tally total;
  int64_t found = 0, trials = 0;
  for (; trials < flags.trials && Clock::now() < end && found < flags.findings; ++trials) {
    const uint64_t seed = static_cast<uint64_t>(flags.seed + trials);
    const Trial trial = DrawTrial(seed);
    total.requests += trial.asks.size();
    const Verdict verdict = PlayApart(trial, flags.answers);
    if (!verdict.kind.empty()) {
      ++found;
      std::cout << "seed " << seed << ", " << verdict.kind << " after " << total.requests
                << " requests: " << verdict.what << "\nsmaller: " << std::flush;
      const Json small =
          Minimise(ToJson(trial), verdict.kind, std::chrono::seconds(flags.minimise_seconds));
      std::cout << small.dump() << "\n  " << PlayApart(TrialOf(small)).what << std::endl;
      if (!flags.corpus.empty()) {
        std::ofstream(absl::StrCat(flags.corpus, "/seed-", seed, ".json")) << small.dump(1) << "\n";
      }
    }
    total.requests -= trial.asks.size();
    if (verdict.kind.empty()) total.Add(verdict.tally);
    if (Clock::now() - told > std::chrono::seconds(60)) {
      told = Clock::now();
      std::cout << "[" << std::chrono::duration_cast<std::chrono::seconds>(told - begin).count()
                << " s] " << trials + 1 << " trials; " << total.ToString() << std::endl;
    }
  }
  std::cout << trials << " trials from seed " << flags.seed << "; " << total.ToString() << "; "
            << found << " findings" << std::endl;
  return found > 0;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  using namespace epikv;
  const Flags flags = FlagsOf(argc, argv);
  at::set_num_threads(1);  // a process that forks has no team
  WarmUpModels();
  return flags.files.empty() ? Fuzz(flags) : PlayFiles(flags);
}
