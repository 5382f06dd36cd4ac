#include "runtime/tokenizer/bpe.h"

#include <optional>
#include <queue>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "runtime/tokenizer/byte_alphabet.h"

namespace epikv {
namespace {

constexpr size_t kNone = ~size_t{0};

// A token of a piece being merged, in a doubly linked list over its bytes.
struct Symbol {
  int32_t token;
  size_t previous, next;  // kNone at the ends
  bool merged_away = false;
};

// A merge that was possible when it was queued.
struct Candidate {
  int32_t rank;
  size_t position;  // of the left symbol
  int32_t result;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

bool OccursInUtf8(int byte) { return byte != 0xC0 && byte != 0xC1 && byte < 0xF5; }

// What would change the tokens and is not implemented. With every byte in the vocabulary no
// character is ever unknown, so unk_token and fuse_unk cannot act.
absl::Status CheckOptions(const Json& json) {
  const absl::Status status = CheckFields(
      json, "model",
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (!status.ok()) return status;
  const Json& dropout = Field(json, "dropout");
  if (!dropout.is_null() && dropout != 0) return Unsupported("model.dropout", "must be null or 0");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Field(json, affix);
    if (!value.is_null() && value != "") {
      return Unsupported(absl::StrCat("model.", affix), "must be null or empty");
    }
  }
  const absl::StatusOr<bool> fallback = BoolField(json, "model", "byte_fallback", false);
  if (!fallback.ok()) return fallback.status();
  if (*fallback) return Unsupported("model.byte_fallback", "must be false");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenModel>> Bpe::FromJson(const Json& json, Vocabulary vocabulary) {
  const absl::Status options = CheckOptions(json);
  if (!options.ok()) return options;
  std::unique_ptr<Bpe> bpe(new Bpe(std::move(vocabulary)));
  const absl::StatusOr<bool> ignore_merges = BoolField(json, "model", "ignore_merges", false);
  if (!ignore_merges.ok()) return ignore_merges.status();
  bpe->ignore_merges_ = *ignore_merges;
  const absl::Status bytes = bpe->ReadByteTokens();
  if (!bytes.ok()) return bytes;
  const absl::Status merges = bpe->ReadMerges(Field(json, "merges"));
  if (!merges.ok()) return merges;
  return bpe;
}

absl::Status Bpe::ReadByteTokens() {
  for (int byte = 0; byte < 256; ++byte) {
    if (!OccursInUtf8(byte)) continue;
    const auto found = vocabulary_.find(ByteCharacter(static_cast<uint8_t>(byte)));
    if (found == vocabulary_.end()) {
      return Unsupported("model.vocab",
                         absl::StrCat("has no token for the byte 0x", absl::Hex(byte)));
    }
    byte_tokens_[byte] = found->second;
  }
  return absl::OkStatus();
}

absl::Status Bpe::ReadMerges(const Json& json) {
  if (!json.is_array()) return Malformed("model.merges", "must be a list");
  merges_.reserve(json.size());
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("model.merges[", i, "]");
    std::vector<std::string> pair;
    if (json[i].is_string()) {  // old files: the two tokens and a space between them
      const std::string& line = json[i].get_ref<const std::string&>();
      if (absl::StartsWith(line, "#version")) continue;
      pair = absl::StrSplit(line, ' ');
    } else if (json[i].is_array()) {
      for (const Json& token : json[i]) {
        if (token.is_string()) pair.push_back(token.get<std::string>());
      }
    }
    if (pair.size() != 2) return Malformed(path, "must be a pair of tokens");
    // Ranks need only ascend.
    const absl::Status status = AddMerge(pair[0], pair[1], static_cast<int32_t>(i), path);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Bpe::AddMerge(const std::string& left, const std::string& right, int32_t rank,
                           const std::string& path) {
  int32_t ids[3];
  const std::string tokens[3] = {left, right, left + right};
  for (int i = 0; i < 3; ++i) {
    const auto found = vocabulary_.find(tokens[i]);
    if (found == vocabulary_.end()) {
      return Malformed(path,
                       absl::StrCat("names '", tokens[i], "', which is not in the vocabulary"));
    }
    ids[i] = found->second;
  }
  // A pair given twice has the later rank, as in `tokenizers`.
  merges_.insert_or_assign(Pair(ids[0], ids[1]), Merge{rank, ids[2]});
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Bpe::Encode(absl::string_view piece) const {
  if (ignore_merges_) {
    std::string word;
    for (char byte : piece) absl::StrAppend(&word, ByteCharacter(static_cast<uint8_t>(byte)));
    const auto found = vocabulary_.find(word);
    if (found != vocabulary_.end()) return std::vector<int32_t>{found->second};
  }
  std::vector<int32_t> tokens;
  tokens.reserve(piece.size());
  for (char byte : piece) tokens.push_back(byte_tokens_[static_cast<uint8_t>(byte)]);
  return MergeAll(tokens);
}

std::vector<int32_t> Bpe::MergeAll(const std::vector<int32_t>& tokens) const {
  std::vector<Symbol> symbols(tokens.size());
  for (size_t i = 0; i < symbols.size(); ++i) {
    symbols[i] = {tokens[i], i == 0 ? kNone : i - 1, i + 1 == symbols.size() ? kNone : i + 1};
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
  const auto find = [&](size_t left) {
    return merges_.find(Pair(symbols[left].token, symbols[symbols[left].next].token));
  };
  const auto consider = [&](size_t left) {
    if (left == kNone || symbols[left].next == kNone) return;
    const auto merge = find(left);
    if (merge != merges_.end()) queue.push({merge->second.rank, left, merge->second.result});
  };
  for (size_t i = 0; i < symbols.size(); ++i) consider(i);

  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (left.merged_away || left.next == kNone) continue;
    const auto merge = find(top.position);
    // A candidate is stale unless its neighbours still give what was queued.
    if (merge == merges_.end() || merge->second.result != top.result) continue;
    Symbol& right = symbols[left.next];
    left.token = top.result;
    left.next = right.next;
    right.merged_away = true;
    if (left.next != kNone) symbols[left.next].previous = top.position;
    consider(left.previous);
    consider(top.position);
  }

  std::vector<int32_t> merged;
  for (const Symbol& symbol : symbols) {
    if (!symbol.merged_away) merged.push_back(symbol.token);
  }
  return merged;
}

}  // namespace epikv
