# xgrammar's C++ core as a static library with our flags: its own CMakeLists.txt wants -flto, -Werror and
# Python's bindings. deploy/setup.sh fetches the archive and checks its hash.

if(NOT EXISTS "${EPIKV_XGRAMMAR_SDIST}")
  message(FATAL_ERROR "EPIKV_XGRAMMAR_SDIST='${EPIKV_XGRAMMAR_SDIST}' is no file. It is xgrammar's source "
    "archive; deploy/setup.sh fetches it.")
endif()
get_filename_component(_name ${EPIKV_XGRAMMAR_SDIST} NAME)
string(REGEX REPLACE "[.]tar[.]gz$" "" _name ${_name})
set(_xgrammar ${PROJECT_BINARY_DIR}/${_name})

# Replaces a text in all its places in one of the library's files.
function(edit_xgrammar file before after)
  file(READ ${_xgrammar}/cpp/${file} text)
  string(REPLACE "${before}" "${after}" edited "${text}")
  if(edited STREQUAL text)
    message(FATAL_ERROR "xgrammar's ${file} is not as cmake/xgrammar.cmake expects: no '${before}'")
  endif()
  file(WRITE ${_xgrammar}/cpp/${file} "${edited}")
endfunction()

# Unpacked again when this file or the archive has changed.
file(SHA256 ${CMAKE_CURRENT_LIST_FILE} _edits)
file(SHA256 ${EPIKV_XGRAMMAR_SDIST} _archive)
set(_stamp ${_xgrammar}/epikv.stamp)
set(_unpacked "")
if(EXISTS ${_stamp})
  file(READ ${_stamp} _unpacked)
endif()
if(NOT _unpacked STREQUAL "${_edits}${_archive}")
  file(REMOVE_RECURSE ${_xgrammar})
  file(ARCHIVE_EXTRACT INPUT ${EPIKV_XGRAMMAR_SDIST} DESTINATION ${PROJECT_BINARY_DIR}
    PATTERNS "*/cpp/*" "*/include/*" "*/picojson.h" "*/dlpack.h" "*/LICENSE" "*/NOTICE")

  # A token's descendants are those that it begins, not those that it is somewhere in: what the wrong ones
  # inherited was that they cannot follow.
  edit_xgrammar(tokenizer_info.cc "(token.find(prefix_stack.top().first) == std::string::npos)"
    "(token.rfind(prefix_stack.top().first, 0) != 0)")

  # (ab?)? and (ab?){1,} began or went on in the middle of what they repeat: they shared a state that has
  # edges of its own.
  edit_xgrammar(fsm.cc "  if (!ends_.empty()) {
    fsm.AddEpsilonEdge(start_, ends_.front());
  }
  return FSMWithStartEnd(fsm, start_, ends_);" "  const int new_start = fsm.AddState();
  fsm.AddEpsilonEdge(new_start, start_);
  std::vector<int32_t> new_ends = ends_;
  new_ends.push_back(new_start);
  return FSMWithStartEnd(fsm, new_start, new_ends);")
  edit_xgrammar(fsm_builder.cc "  // Handling {n,}\n" "  if (!has_upper_bound) {
    std::vector<FSMWithStartEnd> copies(state.lower_bound, child);
    copies.push_back(child.Star());
    return ResultOk(FSMWithStartEnd::Concat(copies));
  }\n")

  # UTF-8 has neither surrogates nor longer spellings of shorter characters.
  edit_xgrammar(fsm_builder.cc "  // Ensure max and min are valid unicode value.\n" "  constexpr uint32_t kFirstSurrogate = 0xEDA080, kAboveSurrogates = 0xEE8080;
  if (min < kAboveSurrogates && max >= kFirstSurrogate) {
    if (min < kFirstSurrogate) AddPackedUTF8RangeEdges(fsm, from, to, min, 0xED9FBF);
    if (max >= kAboveSurrogates) AddPackedUTF8RangeEdges(fsm, from, to, kAboveSurrogates, max);
    return;
  }\n")
  edit_xgrammar(fsm_builder.h "kMin2BytesUnicode = 0xC080" "kMin2BytesUnicode = 0xC280")
  edit_xgrammar(fsm_builder.h "kMin3BytesUnicode = 0xE08080" "kMin3BytesUnicode = 0xE0A080")
  edit_xgrammar(fsm_builder.h "kMin4BytesUnicode = 0xF0808080" "kMin4BytesUnicode = 0xF0908080")

  # Nor are there escapes of what is no character, and numbers of any length.
  edit_xgrammar(support/encoding.h "codepoint = codepoint * 16 + digit;"
    "codepoint = codepoint > 0x10FFFF ? codepoint : codepoint * 16 + digit;")
  edit_xgrammar(support/encoding.h "    return {codepoint, len + 2};"
    "    if (codepoint > 0x10FFFF || (codepoint & ~0x7FF) == 0xD800) {
      return {CharHandlingError::kInvalidEscape, 0};
    }
    return {codepoint, len + 2};")

  # Strings of JSON have no control characters, and what a pattern matches in them is a string, too: the way
  # that is taken where there is no automaton knows nothing of quotes.
  edit_xgrammar(json_schema_converter.cc [==[AddCharacterClass({{'"', '"'}]==]
    [==[AddCharacterClass({{0, 0x1f}, {'"', '"'}]==])
  edit_xgrammar(json_schema_converter.cc "  // Keep regex conversion independent." "  XGRAMMAR_CHECK(!json_string)
      << \"the pattern is not supported: printable ASCII, and none of what JSON escapes in strings\";
  // Keep regex conversion independent.")

  # Schemas are one only where they are spelled alike: taken for one were those that differ in properties
  # named as title, default ... are, or in their order.
  edit_xgrammar(json_schema_converter.cc
    "std::string SchemaParser::ComputeCacheKey(const picojson::value& schema) {\n"
    "std::string SchemaParser::ComputeCacheKey(const picojson::value& schema) {
  return schema.serialize(false);\n")

  # A key beside properties is none of theirs: compared by characters, not by bytes, nor escaped as long as
  # it could be.
  edit_xgrammar(json_schema_converter.h "std::map<uint8_t, TrieNode>" "std::map<int32_t, TrieNode>")
  edit_xgrammar(json_schema_converter.cc "#include \"support/json_parse.h\""
    "#include \"support/encoding.h\"\n#include \"support/json_parse.h\"")
  edit_xgrammar(json_schema_converter.cc
    [==[  choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));
  for (const auto& [character, child]]==] "  for (const auto& [character, child]")
  edit_xgrammar(json_schema_converter.cc "ByteString(std::string(1, static_cast<char>(character)))"
    "ByteString(CharToUTF8(character))")
  edit_xgrammar(json_schema_converter.cc "    for (unsigned char c : prop.name) {
      cur = &cur->children[c];
    }
    cur->is_terminal = true;" "    bool escaped = false;
    for (TCodepoint c : ParseUTF8(prop.name.c_str())) {
      escaped = c < 0x20 || c == '\"' || c == '\\\\';
      if (escaped) break;
      cur = &cur->children[c];
    }
    cur->is_terminal |= !escaped;")

  # A number between limits has six decimals at most: none may be left, which is no empty text.
  edit_xgrammar(json_schema_converter.cc
    "  return NumberGenerator::FloatRangeRegex(start, end, precision, exclusive_start, exclusive_end);"
    "  const std::string regex =
      NumberGenerator::FloatRangeRegex(start, end, precision, exclusive_start, exclusive_end);
  XGRAMMAR_CHECK(regex != \"^()$\") << \"no number of at most \" << precision
                                   << \" decimals is between the limits\";
  return regex;")

  # What is wrong with a regex is told without the regex; the rule's name lies where rules that the regex
  # has added have moved it from.
  edit_xgrammar(grammar_functor.cc
    "      XGRAMMAR_LOG(FATAL) << \"Failed to build the automaton for rule \" << *rule_name_
                          << \" with regex \" << regex << \": \" << error.what();"
    "      XGRAMMAR_LOG(FATAL) << error.what();")

  # Days that are in the calendar of each year, no leap seconds, and no bytes that begin with 0.
  edit_xgrammar(json_schema_converter.cc [==[(0[1-9]|1[0-2])-(0[1-9]|[1-2]\\d|3[01])]==]
    [==[((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8]))]==])
  edit_xgrammar(json_schema_converter.cc [==[([0-5]\\d|60)]==] [==[[0-5]\\d]==])
  edit_xgrammar(json_schema_converter.cc [==[[0-1]?\\d?\\d]==] [==[1\\d\\d|[1-9]?\\d]==])

  # 0.1 is written so, not 0.10000000000000001.
  edit_xgrammar(../3rdparty/picojson/picojson.h "      double tmp;\n      SNPRINTF(" "      double tmp;
      for (int digits = 15; modf(u_.number_, &tmp) != 0 && digits <= 17; ++digits) {
        SNPRINTF(buf, sizeof(buf), \"%.*g\", digits, u_.number_);
        if (strtod(buf, nullptr) == u_.number_) return buf;
      }
      SNPRINTF(")

  # What grammars of a few bytes can make grow without bound is counted: runtime/constraints/grammar_work.h.
  edit_xgrammar(support/logging.h "#include \"cpptrace.h\""
    "#include \"runtime/constraints/grammar_work.h\"\n#include \"cpptrace.h\"")
  edit_xgrammar(grammar_builder.cc "// Offsets into grammar_expr_data_ are stored as int32."
    "epikv::SpendGrammarMemory(1 + grammar_expr.data_len);")
  edit_xgrammar(fsm.cc "  int AddState() {\n" "  int AddState() {\n    epikv::SpendGrammarMemory(1);\n")
  edit_xgrammar(fsm.cc "  void AddEdge(int from, int to, int32_t min, int32_t max) {\n"
    "  void AddEdge(int from, int to, int32_t min, int32_t max) {\n    epikv::SpendGrammarMemory(1);\n")
  edit_xgrammar(fsm.cc "  while (changed) {\n"
    "  while (changed) {\n    epikv::SpendGrammarWork(4 * result.NumStates());\n")
  edit_xgrammar(fsm.cc "      std::unordered_set<int> next_closure;\n"
    "      std::unordered_set<int> next_closure;
      epikv::SpendGrammarMemory(closures.size() + closures[now_process].size());\n")
  edit_xgrammar(earley_parser.h "  void Enqueue(const ParserState& state) {\n"
    "  void Enqueue(const ParserState& state) {\n    epikv::SpendGrammarWork(1);\n")
  edit_xgrammar(earley_parser.h "  void EnqueueWithoutProcessing(const ParserState& state) {\n"
    "  void EnqueueWithoutProcessing(const ParserState& state) {\n    epikv::SpendGrammarWork(1);\n")
  edit_xgrammar(earley_parser.cc "void EarleyParser::Scan(const ParserState& state, const uint8_t ch) {\n"
    "void EarleyParser::Scan(const ParserState& state, const uint8_t ch) {\n  epikv::SpendGrammarWork(1);\n")
  edit_xgrammar(earley_parser.cc "  for (const auto& [ref_id, parent_state] : parent_states_map) {\n"
    "  epikv::SpendGrammarWork(parent_states_map.size() / 8);
  for (const auto& [ref_id, parent_state] : parent_states_map) {\n")
  edit_xgrammar(earley_parser.cc "for (const auto& parent_state_iter : parent_states_map) {\n"
    "for (const auto& parent_state_iter : parent_states_map) {
          epikv::SpendGrammarWork(1 + rule_id_to_completable_states_.Back().size() / 8);\n")
  edit_xgrammar(grammar_compiler.cc
    "AdaptiveTokenMask GrammarMatcherForTokenMaskCache::GetAdaptiveTokenMask(bool is_root_rule) {\n"
    "AdaptiveTokenMask GrammarMatcherForTokenMaskCache::GetAdaptiveTokenMask(bool is_root_rule) {
  epikv::SpendGrammarWork(64 + tokenizer_info_.GetVocabSize() / 8);\n")

  # Each matcher had a byte for each rule that it met and each state of the whole grammar: those of the
  # rule's own states will do.
  edit_xgrammar(earley_parser.h "  std::vector<std::vector<uint8_t>> fsm_state_flags_cache_;"
    "  struct FsmStateFlags {
    int32_t first = 0;
    std::vector<uint8_t> flags;  // of states from the first on

    bool Has(int32_t state) const {
      return state >= first && state - first < static_cast<int32_t>(flags.size());
    }
    uint8_t& At(int32_t state) {
      if (flags.empty()) first = state;
      if (state < first) {
        const int32_t more =
            std::min(first, std::max(first - state, static_cast<int32_t>(flags.size())));
        flags.insert(flags.begin(), more, 0);
        first -= more;
      }
      if (!Has(state)) flags.resize(state - first + 1);
      return flags[state - first];
    }
  };
  std::vector<FsmStateFlags> fsm_state_flags_cache_;")
  edit_xgrammar(earley_parser.h "    if (!flags_cache.empty()) {
      XGRAMMAR_DCHECK(state_id >= 0 && state_id < static_cast<int32_t>(flags_cache.size()));
      if (flags_cache[state_id] != 0) {
        return flags_cache[state_id];
      }
    }" "    if (flags_cache.Has(state_id) && flags_cache.At(state_id) != 0) return flags_cache.At(state_id);")
  edit_xgrammar(earley_parser.cc "  if (flags_cache.empty()) {
    flags_cache.resize(fsm.NumStates());
  }
  XGRAMMAR_DCHECK(state_id >= 0 && state_id < static_cast<int32_t>(flags_cache.size()));
  uint8_t& flags = flags_cache[state_id];" "  uint8_t& flags = flags_cache.At(state_id);")

  # The size of a grammar: rules' names, what vectors have in reserve, maps' nodes, and a matcher at the start.
  edit_xgrammar(support/memory_size.h "template <typename>
inline constexpr bool false_v = false;" "template <typename>
inline constexpr bool false_v = false;

template <typename T, typename = void>
inline constexpr bool has_capacity = false;
template <typename T>
inline constexpr bool has_capacity<T, std::void_t<decltype(std::declval<const T&>().capacity())>> =
    true;

template <typename T, typename = void>
inline constexpr bool is_hash_table = false;
template <typename T>
inline constexpr bool
    is_hash_table<T, std::void_t<decltype(std::declval<const T&>().bucket_count())>> = true;

template <typename T>
std::size_t OwnSize(const T& container) {
  const std::size_t element = sizeof(ElementType<T>);
  if constexpr (has_capacity<T>) {
    return element * container.capacity();
  } else if constexpr (is_hash_table<T>) {
    return (element + 2 * sizeof(void*)) * std::size(container) +
           sizeof(void*) * container.bucket_count();
  } else {
    return element * std::size(container);
  }
}")
  edit_xgrammar(support/memory_size.h
    "sizeof(detail::memory_size::ElementType<T>) * std::size(value)" "detail::memory_size::OwnSize(value)")
  edit_xgrammar(support/memory_size.h "inline constexpr std::size_t MemorySize(const T& value)"
    "inline std::size_t MemorySize(const T& value)")
  edit_xgrammar(grammar.cc "  return impl.rules_.size() * sizeof(Grammar::Impl::Rule) +"
    "  std::size_t names = 0;
  const std::size_t within = std::string().capacity();
  for (const auto& rule : impl.rules_) {
    if (rule.name.capacity() > within) names += rule.name.capacity() + 1;
  }
  return names + impl.rules_.capacity() * sizeof(Grammar::Impl::Rule) +")
  edit_xgrammar(earley_parser.h "class EarleyParser {\n" "class EarleyParser {
  friend std::size_t MemorySize(const EarleyParser& parser) {
    std::size_t size = parser.fsm_state_flags_cache_.capacity() * sizeof(FsmStateFlags) +
                       parser.rule_is_nullable_.capacity();
    for (const auto& cached : parser.fsm_state_flags_cache_) size += cached.flags.capacity();
    return size + MemorySize(parser.rule_id_to_completable_states_) +
           MemorySize(parser.scanable_state_history_);
  }

")
  edit_xgrammar(../include/xgrammar/matcher.h "  GrammarMatcher Fork() const;\n"
    "  GrammarMatcher Fork() const;\n  std::size_t MemorySizeBytes() const;\n")
  edit_xgrammar(grammar_matcher.cc "GrammarMatcher GrammarMatcher::Fork() const {"
    "std::size_t GrammarMatcher::MemorySizeBytes() const {
  return MemorySize(static_cast<const EarleyParser&>(*pimpl_));
}

GrammarMatcher GrammarMatcher::Fork() const {")
  file(WRITE ${_stamp} "${_edits}${_archive}")
endif()

file(GLOB_RECURSE _sources ${_xgrammar}/cpp/*.cc)
list(FILTER _sources EXCLUDE REGEX "/cpp/tvm_ffi/")
add_library(xgrammar STATIC ${_sources} ${PROJECT_SOURCE_DIR}/runtime/constraints/grammar_work.cc)
# Its own standard: in C++20 it is none to clang 14.
# Together: its headers are most of what the compiler reads.
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17 UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 7)
set_source_files_properties(${_xgrammar}/cpp/json_schema_converter.cc
  ${PROJECT_SOURCE_DIR}/runtime/constraints/grammar_work.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_include_directories(xgrammar SYSTEM
  PUBLIC ${_xgrammar}/include ${_xgrammar}/3rdparty/dlpack/include
  PRIVATE ${_xgrammar}/3rdparty/picojson)
target_include_directories(xgrammar PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(xgrammar PRIVATE XGRAMMAR_LOG_CUSTOMIZE=1 XGRAMMAR_ENABLE_CPPTRACE=0
  XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
target_compile_options(xgrammar PRIVATE -w -g0)
if(EPIKV_SANITIZE)
  target_compile_options(xgrammar PRIVATE -fsanitize=${EPIKV_SANITIZE} -fno-omit-frame-pointer -O1)
endif()
target_link_libraries(xgrammar PUBLIC Threads::Threads)
