#include "runtime/constraints/constraint.h"

#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/constraints/constraint_text.h"
#include "runtime/constraints/grammar_work.h"
#include "runtime/constraints/json_schema.h"
#include "runtime/text/utf8.h"

namespace epikv {
namespace {

// In units of GrammarWork. A compilation visits the vocabulary once for each state of the grammar.
constexpr int64_t kCompileWork = 4'000'000, kCompileWorkPerToken = 800;
constexpr int64_t kCompileMemory = 1'000'000;  // of it, whatever the vocabulary
// Of one step of one completion: the engine's thread waits for it.
constexpr int64_t kStepWork = 4'000'000;
// What the positions behind a completion may keep: so much, and so much for each byte of text.
constexpr int64_t kSpareWork = 1'000'000, kSpareWorkPerByte = 256;
constexpr int64_t kBytesOfWork = 32;  // that a position keeps

absl::Status Failed(absl::string_view why) {
  return WithReason(absl::FailedPreconditionError(why), kConstraintFailed);
}

// Throws where a regex is none, or is to the other of the library's two readers, the one that does
// not make automata: what they read in two ways is told, not guessed.
void CheckRegex(const std::string& regex) { xgrammar::Grammar::FromRegex(regex); }

// What the library says, fit to be told: it quotes bytes of the text, which may cut characters.
std::string Told(absl::string_view what) {
  constexpr size_t kMost = 512;
  return ValidUtf8(what.substr(0, kMost));
}

// What the library warns of, "...; ignoring ...", without what it would have done.
absl::Status NotSupported(absl::string_view warning) {
  return absl::InvalidArgumentError(
      absl::StrCat("is not supported: ", Told(warning.substr(0, warning.find("; ")))));
}

xgrammar::Grammar GrammarOfTag(const std::string& tag) {
  auto grammar = xgrammar::Grammar::FromStructuralTag(tag);
  if (auto* made = std::get_if<xgrammar::Grammar>(&grammar)) return *std::move(made);
  std::visit([](const auto& error) { throw std::runtime_error(error.what()); },
             std::get<xgrammar::StructuralTagError>(grammar));
  throw std::logic_error("no error says why");
}

// White space at its edges belongs to it.
xgrammar::Grammar GrammarOfThinking(const ThinkingBefore& thinking) {
  using Json = nlohmann::json;
  const Json space = {{"type", "regex"}, {"pattern", "[ \\t\\r\\n]{0,16}"}};
  const Json thought = {{"type", "tag"},
                        {"begin", thinking.begun ? "" : thinking.begin},
                        {"content", {{"type", "any_text"}}},
                        {"end", thinking.end}};
  Json format = {{"type", "sequence"},
                 {"elements", thinking.begun ? Json{thought, space} : Json{space, thought, space}}};
  if (!thinking.begun) format = {{"type", "optional"}, {"content", std::move(format)}};
  return GrammarOfTag(Json{{"type", "structural_tag"}, {"format", std::move(format)}}.dump());
}

xgrammar::Grammar GrammarOf(const ConstraintText& text) {
  switch (text.kind) {
    case ConstraintText::Kind::kRegex:
      CheckRegex(text.texts.front());
      return xgrammar::Grammar::FromEBNF(GrammarOfRegex(text.texts.front()));
    case ConstraintText::Kind::kChoice:
      return xgrammar::Grammar::FromEBNF(GrammarOfChoices(text.texts));
    case ConstraintText::Kind::kJsonSchema: {
      const JsonSchema schema = *ReadJsonSchema(text.texts.front());
      for (const std::string& pattern : schema.patterns) CheckRegex(pattern);
      return xgrammar::Grammar::FromJSONSchema(schema.text);
    }
    case ConstraintText::Kind::kStructuralTag:
      for (size_t i = 1; i < text.texts.size(); ++i) CheckRegex(text.texts[i]);
      return GrammarOfTag(text.texts.front());
    case ConstraintText::Kind::kGrammar:
      break;
  }
  return xgrammar::Grammar::FromEBNF(text.texts.front());
}

xgrammar::Grammar WholeGrammarOf(const ConstraintText& text) {
  xgrammar::Grammar grammar = GrammarOf(text);
  if (!text.thinking.has_value()) return grammar;
  return xgrammar::Grammar::Concat({GrammarOfThinking(*text.thinking), grammar});
}

// Whether it is of an answer's parts, and so of their markup.
bool HasMarkup(const ConstraintText& text) {
  return text.kind == ConstraintText::Kind::kStructuralTag || text.thinking.has_value();
}

// Sets the bits of the tokens that may come next, of `vocab_size`.
void Fill(xgrammar::GrammarMatcher& matcher, int64_t vocab_size, std::vector<uint32_t>& allowed) {
  auto words = static_cast<int64_t>(allowed.size());
  DLTensor tensor{.data = allowed.data(),
                  .device = {kDLCPU, 0},
                  .ndim = 1,
                  .dtype = xgrammar::GetBitmaskDLType(),
                  .shape = &words,
                  .strides = nullptr,
                  .byte_offset = 0};
  matcher.FillNextTokenBitmask(&tensor);
  // Bits behind the last token's may be set, too.
  if (vocab_size % 32 != 0) allowed.back() &= (uint32_t{1} << (vocab_size % 32)) - 1;
}

void SetBit(std::vector<uint32_t>& bits, int32_t token, bool value) {
  const uint32_t bit = uint32_t{1} << (token % 32);
  uint32_t& word = bits[token / 32];
  word = value ? word | bit : word & ~bit;
}

bool Bit(const std::vector<uint32_t>& bits, int32_t token) {
  return (bits[token / 32] >> (token % 32) & 1) != 0;
}

bool AnyBit(const std::vector<uint32_t>& bits) {
  return std::any_of(bits.begin(), bits.end(), [](uint32_t word) { return word != 0; });
}

std::string KeyOf(const ConstraintText& text) {
  std::string key = absl::StrCat(static_cast<int>(text.kind));
  for (const std::string& part : text.texts) absl::StrAppend(&key, ":", part.size(), ":", part);
  if (const auto& thinking = text.thinking; thinking.has_value()) {
    absl::StrAppend(&key, "|", thinking->begun ? "" : thinking->begin, "|", thinking->end);
  }
  return key;
}

}  // namespace

// Tokens as xgrammar sees them: bytes by id, none of what is no text.
struct ConstraintCompiler::Vocabulary {
  xgrammar::TokenizerInfo tokens;
  std::vector<std::string> bytes;  // [vocab]
  // Those of a completion's first token, where they are others; else empty. Absent: it cannot be
  // the first.
  std::vector<std::optional<std::string>> first_bytes;
};

struct Constraint::Compiled {
  std::shared_ptr<const ConstraintCompiler::Vocabulary> vocabulary;
  xgrammar::GrammarMatcher start;  // copied, never moved on
  std::vector<uint32_t> allowed;   // at the start
  bool may_end = false;
  int64_t start_bytes = 0, bytes = 0;  // of `start`; with it
};

struct ConstraintState::Position {
  xgrammar::GrammarMatcher matcher;
};

namespace {

using Vocabulary = ConstraintCompiler::Vocabulary;

// shown: special tokens that are text.
absl::StatusOr<std::shared_ptr<const Vocabulary>> ReadVocabulary(const Tokenizer& tokenizer,
                                                                 int64_t vocab_size,
                                                                 absl::Span<const int32_t> shown) {
  std::vector<std::string> bytes(vocab_size);
  std::vector<std::optional<std::string>> first_bytes(vocab_size);
  bool others = false;
  for (int32_t id = 0; id < std::min(vocab_size, tokenizer.vocab_size()); ++id) {
    const std::optional<absl::string_view> text = tokenizer.TokenBytes(id);
    const bool is_text =
        !tokenizer.IsSpecial(id) || std::find(shown.begin(), shown.end(), id) != shown.end();
    if (!text.has_value() || !is_text) continue;
    bytes[id] = absl::StrCat(tokenizer.separator(), *text);
    if (bytes[id].empty()) continue;
    first_bytes[id] = tokenizer.FirstTokenBytes(id);
    others |= first_bytes[id] != bytes[id];
  }
  if (!others) first_bytes.clear();
  if (std::all_of(bytes.begin(), bytes.end(), [](const std::string& b) { return b.empty(); })) {
    return Failed("constraints do not work with this model: none of its tokens is text");
  }
  try {
    // No stop tokens: which those are is a matter of the request.
    return std::make_shared<const Vocabulary>(
        Vocabulary{xgrammar::TokenizerInfo(bytes, xgrammar::VocabType::RAW, std::nullopt,
                                           std::vector<int32_t>()),
                   bytes, std::move(first_bytes)});
  } catch (const std::exception& e) {
    return Failed(
        absl::StrCat("constraints do not work with this model's vocabulary: ", Told(e.what())));
  }
}

// As Fill, of tokens whose bytes are others where they are the first.
void FillFirst(const std::vector<std::optional<std::string>>& first_bytes,
               xgrammar::GrammarMatcher& matcher, std::vector<uint32_t>& allowed) {
  std::vector<int32_t> order;
  for (size_t id = 0; id < first_bytes.size(); ++id) {
    if (first_bytes[id].has_value()) order.push_back(static_cast<int32_t>(id));
  }
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return *first_bytes[a] < *first_bytes[b]; });
  std::string taken;  // by the matcher
  for (const int32_t id : order) {
    const std::string& bytes = *first_bytes[id];
    const size_t common = static_cast<size_t>(
        std::mismatch(bytes.begin(), bytes.end(), taken.begin(), taken.end()).first -
        bytes.begin());
    if (common < taken.size()) matcher.Rollback(static_cast<int>(taken.size() - common));
    taken.resize(common);
    while (taken.size() < bytes.size() && matcher.AcceptString(bytes.substr(taken.size(), 1))) {
      taken.push_back(bytes[taken.size()]);
    }
    if (taken.size() == bytes.size()) SetBit(allowed, id, true);
  }
  if (!taken.empty()) matcher.Rollback(static_cast<int>(taken.size()));
}

absl::StatusOr<std::unique_ptr<const Constraint::Compiled>> CompileFor(
    std::shared_ptr<const Vocabulary> vocabulary, const ConstraintText& text) {
  const auto vocab_size = static_cast<int64_t>(vocabulary->bytes.size());
  const GrammarWork work(kCompileWork + kCompileWorkPerToken * vocab_size, kCompileMemory);
  try {
    xgrammar::GrammarCompiler compiler(vocabulary->tokens, /*max_threads=*/1,
                                       /*cache_enabled=*/false);
    const xgrammar::CompiledGrammar grammar = compiler.CompileGrammar(WholeGrammarOf(text));
    if (!work.warning().empty()) return NotSupported(work.warning());
    xgrammar::GrammarMatcher start(grammar, std::nullopt, /*terminate_without_stop_token=*/true);
    std::vector<uint32_t> allowed((vocab_size + 31) / 32);
    if (vocabulary->first_bytes.empty()) {
      Fill(start, vocab_size, allowed);
    } else {
      FillFirst(vocabulary->first_bytes, start, allowed);
    }
    const bool may_end = start.IsCompleted();
    if (!AnyBit(allowed)) {
      return absl::InvalidArgumentError(
          may_end ? "allows nothing but the empty text"
                  : "allows no text that can be made of this model's tokens");
    }
    const size_t start_bytes = start.MemorySizeBytes();
    size_t bytes = grammar.MemorySizeBytes() + start_bytes + allowed.size() * 4;
    for (const std::string& part : text.texts) bytes += part.size();
    return std::make_unique<const Constraint::Compiled>(
        Constraint::Compiled{std::move(vocabulary), std::move(start), std::move(allowed), may_end,
                             static_cast<int64_t>(start_bytes), static_cast<int64_t>(bytes)});
  } catch (const GrammarTooCostly&) {
    return absl::InvalidArgumentError(
        "is too complex to be compiled; fewer alternatives and smaller repetitions take less");
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(Told(e.what()));
  }
}

}  // namespace

Constraint::Constraint(ConstraintText text, std::unique_ptr<const Compiled> compiled,
                       std::shared_ptr<ConstraintMemory> memory,
                       std::shared_ptr<ConstraintMemory::Share> share)
    : text_(std::move(text)),
      compiled_(std::move(compiled)),
      memory_(std::move(memory)),
      share_(std::move(share)) {
  share_->Hold(bytes());
}

Constraint::~Constraint() { share_->Hold(-bytes()); }

int64_t Constraint::bytes() const { return compiled_->bytes; }

ConstraintState::ConstraintState(std::shared_ptr<const Constraint> constraint,
                                 absl::Span<const int32_t> ends, const std::string& tenant)
    : constraint_(std::move(constraint)),
      share_(constraint_->memory_->Of(tenant)),
      ends_(ends.begin(), ends.end()),
      position_(std::make_unique<Position>(Position{constraint_->compiled_->start.Fork()})),
      allowed_(constraint_->compiled_->allowed),
      may_end_(constraint_->compiled_->may_end),
      spare_work_(kSpareWork) {
  Hold(constraint_->compiled_->start_bytes);
  may_go_on_ = AllowEnds(allowed_, may_end_);
}

ConstraintState::~ConstraintState() { Hold(-bytes_); }

void ConstraintState::Hold(int64_t bytes) {
  bytes_ += bytes;
  share_->Hold(bytes);
}

bool ConstraintState::AllowEnds(std::vector<uint32_t>& allowed, bool may_end) const {
  for (const int32_t end : ends_) SetBit(allowed, end, false);
  const bool may_go_on = AnyBit(allowed);
  for (const int32_t end : ends_) SetBit(allowed, end, may_end);
  return may_go_on;
}

const std::string& ConstraintState::BytesOf(int32_t token, bool is_first) const {
  const ConstraintCompiler::Vocabulary& vocabulary = *constraint_->compiled_->vocabulary;
  if (is_first && !vocabulary.first_bytes.empty()) return *vocabulary.first_bytes[token];
  return vocabulary.bytes[token];
}

// Its memory is needed at once.
absl::Status ConstraintState::GiveUp(absl::string_view why) {
  position_ = nullptr;
  Hold(-bytes_);
  return Failed(why);
}

int64_t ConstraintState::vocab_size() const {
  return static_cast<int64_t>(constraint_->compiled_->vocabulary->bytes.size());
}

int64_t ConstraintState::mask_bytes() const {
  return std::ssize(allowed_) * static_cast<int64_t>(sizeof(uint32_t));
}

void ConstraintState::ForgetAhead() {
  Hold(-std::ssize(ahead_) * mask_bytes());
  ahead_.clear();
}

// In a copy: a matcher that has thrown is of no use any more.
int64_t ConstraintState::LookAhead(absl::Span<const int32_t> tokens, int64_t& work) {
  ForgetAhead();
  if (tokens.empty() || !Bit(allowed_, tokens[0])) return 0;
  const int64_t copied = bytes_;
  work -= copied / kBytesOfWork;
  if (work <= 0) return 0;
  Hold(copied);
  const absl::Cleanup gone = [&] { Hold(-copied); };
  try {
    xgrammar::GrammarMatcher matcher = position_->matcher.Fork();
    for (const int32_t token : tokens) {
      const std::vector<uint32_t>& allowed = ahead_.empty() ? allowed_ : ahead_.back().allowed;
      if (work <= 0 || !Bit(allowed, token)) break;
      const GrammarWork limit(std::min(work, kStepWork));
      int64_t again = 0;  // what Accept takes
      const absl::Cleanup spent = [&] { work -= limit.spent() + again; };
      const std::string& bytes = BytesOf(token, first_ && ahead_.empty());
      if (!bytes.empty() && !matcher.AcceptString(bytes)) break;
      again = limit.spent();
      Behind behind = {.token = token, .allowed = std::vector<uint32_t>(allowed_.size())};
      Fill(matcher, vocab_size(), behind.allowed);
      behind.may_end = matcher.IsCompleted();
      if (!AllowEnds(behind.allowed, behind.may_end)) break;
      ahead_.push_back(std::move(behind));
      Hold(mask_bytes());
    }
  } catch (const std::exception&) {
    // Accept says why, if the token comes.
  }
  return std::ssize(ahead_);
}

absl::Status ConstraintState::Accept(int32_t token) {
  const std::string& bytes = BytesOf(token, std::exchange(first_, false));
  std::optional<Behind> known;
  if (!ahead_.empty() && ahead_.front().token == token) {
    known = std::move(ahead_.front());
    ahead_.pop_front();
    Hold(-mask_bytes());
  } else {
    ForgetAhead();
  }
  const GrammarWork work(kStepWork);
  const absl::Cleanup spent = [&] { work_ = work.spent(); };
  try {
    if (!bytes.empty() && !position_->matcher.AcceptString(bytes)) {
      return Failed(absl::StrCat("the constraint does not allow token ", token));
    }
    Hold(kBytesOfWork * work.spent());
    spare_work_ += kSpareWorkPerByte * static_cast<int64_t>(bytes.size()) - work.spent();
    if (spare_work_ < 0) throw GrammarTooCostly();
    if (share_->MustShrink()) {
      return GiveUp(
          "the constraints of all requests hold too much memory, and those of yours the most; try "
          "again when some of them have ended, or make them less ambiguous");
    }
    if (share_->left() >= 0 && share_->IsFull() && spare_work_ < kSpareWork) {
      return GiveUp(
          "your requests' constraints hold too much memory, and this one keeps more than its text "
          "allows; try again when some of them have ended, or make it less ambiguous");
    }
    if (known.has_value()) {
      allowed_ = std::move(known->allowed);
      may_end_ = known->may_end;
    } else {
      Fill(position_->matcher, vocab_size(), allowed_);
      may_end_ = position_->matcher.IsCompleted();
    }
  } catch (const GrammarTooCostly&) {
    return Failed(
        "the constraint can match the text so far in too many ways; make it less ambiguous");
  } catch (const std::exception& e) {
    return Failed(absl::StrCat("the constraint: ", Told(e.what())));
  }
  may_go_on_ = AllowEnds(allowed_, may_end_);
  if (may_go_on_ || may_end_) return absl::OkStatus();
  return Failed("the constraint: no token of this model's vocabulary continues the text so far");
}

ConstraintCompiler::ConstraintCompiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                       ConstraintLimits limits, std::vector<int32_t> markup)
    : tokenizer_(tokenizer),
      vocab_size_(vocab_size),
      limits_(limits),
      memory_(std::make_shared<ConstraintMemory>(limits.live)),
      markup_(std::move(markup)) {}

ConstraintCompiler::~ConstraintCompiler() = default;

absl::StatusOr<std::shared_ptr<const ConstraintCompiler::Vocabulary>>
ConstraintCompiler::VocabularyFor(const ConstraintText& text) {
  const bool marked = HasMarkup(text) && !markup_.empty();
  std::shared_ptr<const Vocabulary>& known = marked ? marked_vocabulary_ : vocabulary_;
  if (known != nullptr) return known;
  auto made = ReadVocabulary(tokenizer_, vocab_size_, marked ? markup_ : std::vector<int32_t>());
  if (made.ok()) known = *made;
  return made;
}

ConstraintCompiler::Result ConstraintCompiler::Compile(const ConstraintText& text,
                                                       const std::string& tenant) {
  std::string key = KeyOf(text);
  if (std::optional<Result> known = Find(key)) return *std::move(known);
  if (absl::Status status = CheckConstraintText(text); !status.ok()) return status;
  absl::MutexLock lock(&compile_mu_);
  if (std::optional<Result> known = Find(key)) return *std::move(known);  // made meanwhile
  std::shared_ptr<ConstraintMemory::Share> share = memory_->Of(tenant);
  if (share->IsFull()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "your requests' constraints hold ", share->bytes() >> 20, " MiB of memory, and of the ",
        limits_.live >> 20, " MiB for all tenants no more than that is left; try again when some ",
        "requests have ended"));
  }
  auto vocabulary = VocabularyFor(text);
  if (!vocabulary.ok()) return vocabulary.status();
  auto compiled = CompileFor(*std::move(vocabulary), text);
  if (!compiled.ok()) {
    Remember({.key = std::move(key), .result = compiled.status(), .bytes = 0});
    return compiled.status();
  }
  auto constraint =
      std::make_shared<const Constraint>(text, *std::move(compiled), memory_, std::move(share));
  Remember({.key = std::move(key), .result = constraint, .bytes = constraint->bytes()});
  return constraint;
}

std::optional<ConstraintCompiler::Result> ConstraintCompiler::Remembered(
    const ConstraintText& text) {
  return Find(KeyOf(text));
}

std::optional<ConstraintCompiler::Result> ConstraintCompiler::Find(const std::string& key) {
  absl::MutexLock lock(&mu_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  recent_.splice(recent_.begin(), recent_, found->second);
  return found->second->result;
}

void ConstraintCompiler::Remember(Entry entry) {
  entry.bytes += 2 * static_cast<int64_t>(entry.key.size()) + 512;
  if (entry.bytes > limits_.remembered) return;  // it would push out all others, and itself
  absl::MutexLock lock(&mu_);
  remembered_bytes_ += entry.bytes;
  recent_.push_front(std::move(entry));
  by_key_[recent_.front().key] = recent_.begin();
  while (remembered_bytes_ > limits_.remembered) {
    remembered_bytes_ -= recent_.back().bytes;
    by_key_.erase(recent_.back().key);
    recent_.pop_back();
  }
}

}  // namespace epikv
