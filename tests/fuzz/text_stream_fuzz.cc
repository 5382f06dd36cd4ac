// Tokens to text with stop strings, against the definition: what is emitted is the text so far, cut
// where the first stop string ends. Input: a line of options, stop strings, one a line, an empty
// line, and tokens, a byte each.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "runtime/text/text_stream.h"
#include "tests/fuzz/byte_tokenizer.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

// Where the text ends by the definition: the first end of a stop string beyond `from`.
std::optional<std::pair<size_t, size_t>> FirstStop(absl::string_view text, size_t from,
                                                   const std::vector<std::string>& stops) {
  for (size_t end = from + 1; end <= text.size(); ++end) {
    std::optional<std::pair<size_t, size_t>> longest;  // begin, which
    for (size_t i = 0; i < stops.size(); ++i) {
      if (!absl::EndsWith(text.substr(0, end), stops[i])) continue;
      const size_t begin = end - stops[i].size();
      if (!longest.has_value() || begin < longest->first) longest.emplace(begin, i);
    }
    if (longest.has_value()) return longest;
  }
  return std::nullopt;
}

void CheckStream(const TextStreamOptions& options, const std::string& tokens) {
  TextStream stream(Bytes(), options);
  Utf8Repair repair;
  std::string text, emitted;
  size_t ignored = 0;  // bytes of the first min_tokens tokens, where no stop string ends
  std::optional<StopMatch> stopped;
  for (size_t i = 0; i < tokens.size() && !stopped.has_value(); ++i) {
    const int32_t token = static_cast<uint8_t>(tokens[i]);
    if (!options.skip_special || !Bytes().IsSpecial(token)) {
      text += repair.Append(Bytes().TokenBytes(token).value_or(""));
    }
    if (i < static_cast<size_t>(options.min_tokens)) ignored = text.size();
    const TextStream::Piece piece = stream.Append(token);
    Require(!FirstInvalidUtf8(piece.text).has_value(), "pieces are whole code points", piece.text);
    emitted += piece.text;
    stopped = piece.stop;
    Require(absl::StartsWith(text, emitted), "nothing is emitted too soon", emitted);
    const auto stop = FirstStop(text, ignored, options.stop_strings);
    Require(stop.has_value() == stopped.has_value(), "it stops when a stop string ends", text);
  }
  const auto stop = FirstStop(text, ignored, options.stop_strings);
  if (!stop.has_value()) {
    TextStream::Piece rest = stream.Flush();
    emitted += rest.text;
    text += repair.Flush();
    // What was cut short may complete one.
    if (!rest.stop.has_value()) return Require(emitted == text, "all is emitted", emitted);
    stopped = rest.stop;
  }
  const auto found = FirstStop(text, ignored, options.stop_strings);
  Require(found.has_value() && stopped == StopMatch(StopString{found->second}), "which it was");
  const size_t end =
      found->first + (options.include_stop ? options.stop_strings[found->second].size() : 0);
  Require(emitted == text.substr(0, end), "the text is cut at it", emitted);
}

void CheckInput(absl::string_view input) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(input, absl::MaxSplits("\n\n", 1));
  std::vector<std::string> lines = absl::StrSplit(parts.first, '\n');
  const std::string settings = lines.front();
  TextStreamOptions options{.include_stop = absl::StrContains(settings, 'i'),
                            .skip_special = !absl::StrContains(settings, 's'),
                            .min_tokens = absl::StrContains(settings, 'm') ? 3 : 0};
  for (size_t i = 1; i < lines.size() && i <= 8; ++i) {
    if (lines[i].empty() || FirstInvalidUtf8(lines[i]).has_value()) continue;
    options.stop_strings.push_back(lines[i]);
  }
  if (parts.second.size() <= 200) CheckStream(options, parts.second);
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
