#include "runtime/constraints/grammar_work.h"

#include <stdexcept>

namespace epikv {
namespace {

thread_local std::string first_warning;

}  // namespace

GrammarWork::GrammarWork(int64_t most, int64_t most_made) : most_(most) {
  grammar_work_left = most;
  grammar_memory_left = most_made;
  first_warning.clear();
}

GrammarWork::~GrammarWork() {
  grammar_work_left = grammar_memory_left = std::numeric_limits<int64_t>::max();
}

const std::string& GrammarWork::warning() const { return first_warning; }

}  // namespace epikv

// The library's logging (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message) {
  if (epikv::first_warning.empty()) epikv::first_warning = message;
}

}  // namespace xgrammar
