#!/usr/bin/env python3
"""Shows that the tests can fail: plants one fault at a time and expects a named test to turn red.

    python tests/mutants.py --build build/dev [--only NAME]

Works on a copy of the tree with a build folder of its own, seeded with the settings of `--build`;
each mutant rebuilds what it touches (about a minute). Not a part of run.sh.
"""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS = 120  # none of the named tests takes as long


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # occurs exactly once
    new: str
    binary: str
    filter: str  # of the test that must turn red


MUTANTS = [
    Mutant(
        "a lane that is full on another rank makes no round due",
        "runtime/executor/executor.cc",
        "return model_->ranks()->Least(due ? 0 : 1) == 0;",
        "return due;",
        "laws_test",
        "*ByRanks*",
    ),
    Mutant(
        "guesses run past a round of another rank",
        "runtime/executor/ranked_executor.cc",
        "return ranks_->Least(1) == 0;",
        "return ranks_->Least(1) != 0 && false;",
        "laws_test",
        "*ByRanks*",
    ),
    Mutant(
        "averages are of one rank's heads",
        "runtime/executor/policy_view.cc",
        "if (model_.ranks() != nullptr) model_.ranks()->Average(mean.data(), std::ssize(mean));",
        "(void)mean;",
        "laws_test",
        "*ByRanks*",
    ),
    Mutant(
        "heads of all ranks draw alike",
        "policies/lane.cc",
        "layer * cache.all_kv_heads() + cache.first_kv_head() + head",
        "layer * cache.num_kv_heads() + head",
        "laws_test",
        "*ByRanks*",
    ),
    Mutant(
        "every rank adds the bias",
        "runtime/model/model_shard.cc",
        "if (ranks_.rank() > 0) linear->replaceInput(bias, Insert(linear, c10::IValue()));",
        "",
        "laws_test",
        "*ByRanks*",
    ),
    Mutant(
        "a policy that fails on one rank goes on in the others",
        "runtime/executor/ranked_executor.cc",
        "if (all[r * items.size() + i] == 0) continue;",
        "continue;",
        "laws_test",
        "RankLaws.*",
    ),
    Mutant(
        "thinking that has ended stays in the tier",
        "runtime/executor/policy_calls.cc",
        "if (sequence.tier != nullptr) sequence.tier->Forget(thinking);",
        "",
        "laws_test",
        "ThinkingLaws.*",
    ),
    Mutant(
        "a guard goes on asking for thinking that has ended",
        "policies/guarded_policy.cc",
        "table.guard.Forget(begin, end);",
        "",
        "laws_test",
        "ThinkingLaws.*",
    ),
    Mutant(
        "who may have a costly round never goes first",
        "runtime/engine/scheduler.cc",
        "return running[a.sequence].last_step < running[b.sequence].last_step;",
        "return false;",
        "runtime_test",
        "EngineTest.RoundsOfOneStepAreBounded",
    ),
    Mutant(
        "newcomers' rounds go before all others",
        "runtime/engine/engine.cc",
        "s.last_step = steps_;\n    Guard",
        "Guard",
        "runtime_test",
        "EngineTest.WhoComesWaitsForWhoIsThere",
    ),
    Mutant(
        "who waits for a round keeps the room for his prompt",
        "runtime/engine/engine.cc",
        "if (out.empty()) return plan;",
        """if (out.empty()) return plan;
    std::erase_if(plan, [&](const PlannedItem& item) {
      return std::find(out.begin(), out.end(), item.sequence) != out.end();
    });
    return plan;""",
        "runtime_test",
        "EngineTest.WhoComesWaitsForWhoIsThere",
    ),
    Mutant(
        "rounds in prompts are not foretold",
        "runtime/executor/executor.cc",
        "return RoundIsDue(sequence, item, item.ahead + std::ssize(item.tokens));",
        "return item.decode && RoundIsDue(sequence, item, item.ahead + std::ssize(item.tokens));",
        "laws_test",
        "*RoundsAreForetold*",
    ),
    Mutant(
        "guesses go on behind a round",
        "runtime/executor/executor.cc",
        "return RoundIsDue(sequence, item, item.ahead + std::ssize(item.tokens));",
        "return RoundIsDue(sequence, item, std::ssize(item.tokens));",
        "laws_test",
        "*EveryPolicyGuesses*gqa*",
    ),
    Mutant(
        "a guess that did not come is kept",
        "runtime/engine/engine_guesses.cc",
        "s.tokens.back() == item.tokens.front();",
        "true;",
        "runtime_test",
        "EngineGuesses*",
    ),
    Mutant(
        "a guess may be followed by what may follow the token before it",
        "runtime/engine/sequence.cc",
        "constraint->allowed_behind(ahead);",
        "constraint->allowed();",
        "runtime_test",
        "*GuessesAreThoseThatItAllows*",
    ),
    Mutant(
        "guesses of a draft that were wrong stay in its cache",
        "runtime/executor/model_drafter.cc",
        "  if (true_guesses > 0) cache.Append(cached, true_guesses);",
        "  if (true_guesses > 0) cache.Append(cached, std::ssize(drafted.ahead));",
        "laws_test",
        "ModelDrafter.*",
    ),
    Mutant(
        "a draft is not closed with its request",
        "runtime/engine/engine.cc",
        "  if (s.drafts.value_or(false)) drafter_->Close(s.id);",
        "",
        "runtime_test",
        "EngineDrafts.*",
    ),
    Mutant(
        "guesses see what comes behind them",
        "runtime/step/step_item.cc",
        "cache.UsedAfter(cache.TableOf(layer, head), ahead + item.num_rows()));",
        "cache.UsedAfter(cache.TableOf(layer, head), ahead + item.num_rows() + 1));",
        "laws_test",
        "*EveryPolicyGuesses*gqa*",
    ),
    Mutant(
        "tap of the wrong layer",
        "runtime/forward/cpu_forward.cc",
        "taps_[layers[place]].push_back",
        "taps_[layers[place] > 0 ? layers[place] - 1 : 1].push_back",
        "laws_test",
        "*ResidualStepsAreThoseAfterEachBlock*",
    ),
    Mutant(
        "the mass of every layer in the place of the first",
        "runtime/forward/cpu_forward.cc",
        "shape, mass_rows_.layer(layer));",
        "shape, mass_rows_.layer(0));",
        "laws_test",
        "*EvictedAttentionMass/*",
    ),
    Mutant(
        "a replay reads the numbers of the step that was recorded",
        "runtime/forward/device_forward.cc",
        "  step.numbers.narrow(0, 0, now.size(0)).copy_(now, /*non_blocking=*/true);",
        "  if (step.graph == nullptr) step.numbers.narrow(0, 0, now.size(0)).copy_(now);",
        "laws_test",
        "*ReplaysGiveWhatTheCpuGives/gqa_Sliding*",
    ),
    Mutant(
        "a lane's attention is another lane's",
        "runtime/forward/device_forward.cc",
        "lane.rows->lane(lane.layer, lane.head).begin());",
        "lane.rows->lane(lane.layer, 0).begin());",
        "laws_test",
        "*ReplaysGiveWhatTheCpuGives/gqa_H2o*",
    ),
    Mutant(
        "older wins ties",
        "policies/select.cc",
        "candidates.emplace_back(scores[slot], index[slot]);",
        "candidates.emplace_back(scores[slot], -index[slot]);",
        "policy_values_test",
        "*",
    ),
    Mutant(
        "a column not moved",
        "runtime/kv/sequence_cache.cc",
        "    for (auto& column : columns_) column[hole] = column[tail];\n",
        "",
        "laws_test",
        "*Law3*Ragged*",
    ),
    Mutant(
        "caote forgets that the others' weights grow",
        "policies/decorators/caote.cc",
        "weight / (1 - weight).clamp_min(kLeast) * (values",
        "weight * (values",
        "policies_test",
        "*IsTheMeasured*:*IsThatOfEachHead*",
    ),
    Mutant(
        "off-by-one recent",
        "policies/protection.h",
        "index > newest - recent",
        "index > newest - recent + 1",
        "policy_values_test",
        "*",
    ),
    Mutant(
        "values stay when keys move",
        "runtime/kv/kv_pool.cc",
        "    std::memmove(values_ + c.to * value_bytes_, values_ + c.from * value_bytes_,\n"
        "                 c.count * value_bytes_);\n",
        "",
        "laws_test",
        "*Law5_Slots*Knorm*",
    ),
    Mutant(
        "the hole is never filled",
        "runtime/kv/sequence_cache.h",
        "return ahead == 0 ? *hole_ : used_ + ahead - 1;",
        "return used_ + ahead;",
        "laws_test",
        "*Law5_Slots*Sliding*",
    ),
    Mutant(
        "steered output is cached for others",
        "runtime/executor/executor.cc",
        "item.sequence->steering.has_value() ||",
        "false ||",
        "laws_test",
        "*SteeringLaws.SteeredOutput*",
    ),
    Mutant(
        "rounded output is cached for others",
        "runtime/executor/executor.cc",
        "item.sequence->request.traits.rounds_rows);",
        "false);",
        "laws_test",
        "*RoundedOutput*",
    ),
    Mutant(
        "a policy that rounds has nothing to do where all fits",
        "runtime/admission/resolver.cc",
        "if (!evicts && !rounds) {",
        "if (!evicts) {",
        "laws_test",
        "*RoundedOutput*",
    ),
    Mutant(
        "what is told ahead is steered",
        "runtime/step/step_item.cc",
        "if (!item.work->decode || item.pass != nullptr) continue;",
        "if (!item.work->decode && item.pass == nullptr) continue;",
        "laws_test",
        "*SteeringLaws.WhatIsToldAhead*",
    ),
    Mutant(
        "a draft is not reserved",
        "runtime/admission/kv_demand.cc",
        "  demand.prefill_bytes += BytesOf(layout, demand.draft);\n",
        "",
        "laws_test",
        "*Lookahead.IsReserved*",
    ),
    Mutant(
        "an end token is run on from",
        "runtime/executor/executor.cc",
        "if (pass.left == 0 || std::find(ends.begin(), ends.end(), pass.next) != ends.end()) {",
        "if (pass.left == 0) {",
        "laws_test",
        "PassLaws.AnEndTokenIsNotRun",
    ),
    Mutant(
        "a segment is read behind the one before it",
        "runtime/executor/executor.cc",
        "  sequence.cache.SetScratch(0);\n  if (++pass.segment == pass.segments.size())",
        "  if (++pass.segment == pass.segments.size())",
        "laws_test",
        "*Segments.*",
    ),
    Mutant(
        "compact keeps the true index",
        "runtime/kv/sequence_cache.cc",
        "return tables_[table].live() + scratch_;",
        "return next();",
        "laws_test",
        "*Law5_Slots*Sliding*",
    ),
    Mutant(
        "prompt evicted wherever a step ends",
        "runtime/engine/sequence.cc",
        "(end % prefill_chunk_tokens == 0 || item.ends_prefill)",
        "true",
        "laws_test",
        "*Law3_PromptsOverTheBudget*Sliding*",
    ),
    Mutant(
        # The very last row of an extent is free between steps.
        "a moved extent leaves its last live row",
        "runtime/kv/kv_pool.cc",
        "c.count * key_bytes_);",
        "(c.count > 2 ? c.count - 2 : c.count) * key_bytes_);",
        "laws_test",
        "*Law5_Chunked*Sliding*",
    ),
    Mutant(
        "the ledger forgets a release",
        "runtime/admission/ledger.cc",
        "  reserved_ -= held->second;\n",
        "",
        "runtime_test",
        "*",
    ),
    Mutant(
        "a tenant's turn costs nothing",
        "runtime/admission/queue.cc",
        "->saved -= entry.work.tokens;",
        "->saved -= 0;",
        "runtime_test",
        "*TenantsThatBothWaitGetTheSameTokens*",
    ),
    Mutant(
        "who waits does not rise",
        "runtime/admission/queue.cc",
        "    ++risen.in_class;\n",
        "",
        "runtime_test",
        "*NobodyStarvesUnderAFloodOfHigherPriority*",
    ),
    Mutant(
        "the least wait forgets that those ahead overlap",
        "runtime/admission/forecast.cc",
        "std::max(bounds.least, seconds - longest)",
        "std::max(bounds.least, seconds - 0 * longest)",
        "runtime_test",
        "*NothingIsFasterThanTheLeastForecast*",
    ),
    Mutant(
        "missed deadlines teach nothing",
        "runtime/engine/engine.cc",
        "pace_.missing() && running()",
        "false && running()",
        "runtime_test",
        "*GoodputAtTwiceTheCapacity*",
    ),
    Mutant(
        "all who are refused come back at once",
        "runtime/admission/forecast.cc",
        "  refused_ += work;\n",
        "  refused_ = work;\n",
        "runtime_test",
        "*RetriesSucceedMoreOftenThanNot*",
    ),
    Mutant(
        "int8 rows are rounded towards zero",
        "runtime/kernels/kv_format.cc",
        "std::rint(Load(in + i) / scale)",
        "std::trunc(Load(in + i) / scale)",
        "runtime_test",
        "*Nearest*",
    ),
    Mutant(
        "V's scales are K's",
        "runtime/kernels/attend_blocks.inc",
        "value_scales.Read(values, value_bytes, count, dv);",
        "value_scales = key_scales;",
        "runtime_test",
        "*EveryGroupAndWidth/*int8",
    ),
    Mutant(
        "admission counts int8 rows as the model's",
        "runtime/admission/admission.h",
        "return {manifest_.dtype, limits_.kv_dtype};",
        "return {manifest_.dtype, KvDType::kModel};",
        "runtime_test",
        "*Int8Rows*",
    ),
    Mutant(
        "one row too many joins the past",
        "runtime/attention/attention.cc",
        "const int64_t past = group.used - item.num_rows;",
        "const int64_t past = std::max<int64_t>(0, group.used - item.num_rows - 1);",
        "laws_test",
        "*Law5_Chunked*Sliding*",
    ),
    Mutant(
        "the protected do not count for a lane's floor",
        "policies/select.cc",
        "std::clamp<int64_t>(floor - (held - size), 0, size)",
        "std::clamp<int64_t>(floor + 0 * (held - size), 0, size)",
        "policy_values_test",
        "SelectOfPool.*",
    ),
    Mutant(
        "draws favour the light",
        "policies/select.cc",
        "std::log(mass[slot]) - std::log(-std::log(uniform))",
        "std::log(mass[slot]) + std::log(-std::log(uniform))",
        "policy_values_test",
        "DrawnScores.*",
    ),
    Mutant(
        "a floor of what was held",
        "policies/scored_policy.cc",
        "static_cast<double>(held - count) / static_cast<double>(lanes.size())",
        "static_cast<double>(held) / static_cast<double>(lanes.size())",
        "policies_test",
        "*GoldenPolicy*",
    ),
    Mutant(
        "lanes that share a budget have their rounds apart",
        "policies/scored_policy.cc",
        ": recipe_.pool == Pool::kLayer ? heads",
        ": recipe_.pool == Pool::kLayer ? heads / heads",
        "policies_test",
        "*GoldenPolicy*",
    ),
    Mutant(
        "decorators read what nobody declared",
        "policies/recipe.cc",
        "      traits.signals = traits.signals | spec.signals;\n",
        "",
        "policies_test",
        "AddRecipe.*",
    ),
    Mutant(
        "a decorator makes scores comparable",
        "policies/recipe.cc",
        "std::min(score.comparable, spec.gives.comparable)",
        "spec.gives.comparable",
        "policies_test",
        "CheckRecipe.*",
    ),
    Mutant(
        "a pyramid that loses tokens",
        "policies/recipe.cc",
        "std::llround(owed) - spent;",
        "static_cast<int64_t>(owed) - spent;",
        "policies_test",
        "RecipeLaneBudgets.*",
    ),
    Mutant(
        "a query does not see its own token",
        "policies/lane.cc",
        "index().index_select(0, young) > asked",
        "index().index_select(0, young) >= asked",
        "policies_test",
        "*GoldenPolicy*snapkv",
    ),
    Mutant(
        "scores in birth order taken as by slot",
        "policies/lane.cc",
        "return at::empty_like(in_birth_order).index_copy_(0, by_birth(), in_birth_order);",
        "return in_birth_order;",
        "policies_test",
        "*snapkv*",
    ),
    Mutant(
        "every round draws the same",
        "policies/lane.cc",
        "static_cast<uint64_t>(cache.newest() + 1) << 24 |",
        "",
        "policies_test",
        "*",
    ),
    Mutant(
        "a token leaves the recent window late",
        "policies/frozen_policy.cc",
        "state.first_recent <= newest - protection.recent",
        "state.first_recent < newest - protection.recent",
        "policies_test",
        "Flat.*",
    ),
    Mutant(
        "a reserve of one less",
        "policies/frozen_policy.cc",
        "static_cast<int64_t>(state.reserved.size()) > state.reserve.size)",
        "static_cast<int64_t>(state.reserved.size()) >= state.reserve.size)",
        "policies_test",
        "Flat.*",
    ),
    Mutant(
        "segments share no room",
        "policies/segment_policy.cc",
        "    room -= count;\n",
        "",
        "policies_test",
        "*RetainedOfSegments*",
    ),
    Mutant(
        "the older value comes in from the reserve",
        "policies/segment_policy.cc",
        "  std::reverse(in.begin(), in.end());\n",
        "",
        "policies_test",
        "*",
    ),
    Mutant(
        "the window scores nothing",
        "policies/window_score.cc",
        "score.max().expand(n).clone()",
        "at::zeros(n)",
        "policies_test",
        "*GoldenPolicy*snapkv",
    ),
    Mutant(
        "pooling is off by one neighbour",
        "policies/window_score.cc",
        "lane.by_birth().narrow(0, 0, before)",
        "lane.by_birth().narrow(0, 1, before)",
        "policies_test",
        "*GoldenPolicy*snapkv",
    ),
    Mutant(
        "a page is bounded by tokens that are gone",
        "policies/attention/raas_page.cc",
        "if (held[number].tokens == pages.tokens[old]) known[number]",
        "known[number]",
        "policies_test",
        "*",
    ),
    Mutant(
        "duplicates of tokens that have one are not looked for",
        "policies/attention/rkv.cc",
        "    NoteDuplicates(unit, with, older, newest);\n",
        "",
        "policies_test",
        "*",
    ),
    Mutant(
        "a token's means are those of another slot",
        "policies/epikv/lag_kv.h",
        "slots.push_back(slot[born[i]]);",
        "slots.push_back(born[i]);",
        "policies_test",
        "*Remembered*",
    ),
    Mutant(
        "a token takes the means of the one that had its place",
        "policies/epikv/lag_kv.h",
        """      while (known != state.tokens.end() && known->index < token) ++known;
      if (known != state.tokens.end() && known->index == token) {
        now[place] = std::move(*known);
""",
        """      if (known != state.tokens.end()) {
        now[place] = {token, std::move((known++)->mean)};
""",
        "policies_test",
        "*Remembered*",
    ),
    Mutant(
        "a partition lies in its own range",
        "policies/geometry/lagkv.cc",
        "subspan((partition + 1) * lag_, lag_)",
        "subspan(partition * lag_, lag_)",
        "policies_test",
        "*Definition*",
    ),
    Mutant(
        "a query sees tokens younger than itself",
        "policies/attention/scissorhands.cc",
        "seen = until(asked) - first;",
        "seen = n - first;",
        "policies_test",
        "*",
    ),
    Mutant(
        "tova remembers the last query's weights",
        "policies/attention/tova.cc",
        ".column(0).zero_();",
        ".column(0);",
        "policies_test",
        "*",
    ),
    Mutant(
        "a norm is made of the first value in the slot",
        "policies/attention/longflow.cc",
        "norm.eq(0).nonzero()",
        "norm.ge(0).nonzero().narrow(0, 0, 1)",
        "policies_test",
        "*",
    ),
    Mutant(
        "requests of callers that were not admitted",
        "server/call/call.cc",
        "if (const auto refusal = scope_.Admit()) return End(*refusal);",
        "(void)scope_.Admit();",
        "server_test",
        "*NoMethodAnswers*",
    ),
    Mutant(
        "tokens that only begin alike",
        "server/call/tokens.cc",
        "entry.digest.data(), digest.size()) == 0",
        "entry.digest.data(), 0) == 0",
        "server_test",
        "*FindsTheOwners*",
    ),
    Mutant(
        "clients without a certificate",
        "server/port/tls.cc",
        "GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY",
        "GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY",
        "server_test",
        "*OnlyClientsThatItSigned*",
    ),
    Mutant(
        "access log that does not follow its path",
        "server/call/access_log.cc",
        "    sink_->FollowPath();\n",
        "",
        "server_test",
        "*RenamedOrRemoved*",
    ),
    Mutant(
        "typical is likely",
        "runtime/sampling/sampler.cc",
        "s.distance = std::abs(s.distance - entropy);",
        "s.distance = std::abs(s.distance);",
        "runtime_test",
        "*Transformers*",
    ),
    Mutant(
        "the prompt may be repeated",
        "runtime/sampling/sampler.cc",
        "{draw.prompt, draw.outputs}",
        "{draw.outputs, draw.outputs}",
        "runtime_test",
        "*Transformers*",
    ),
    Mutant(
        "a mask that leaves nothing",
        "runtime/sampling/sampler.cc",
        "if (!peak.ok() && !draw.masked.empty()) {",
        "if (!peak.ok() && draw.masked.empty()) {",
        "runtime_test",
        "*GivesWay*",
    ),
    Mutant(
        "an end one token early",
        "runtime/engine/sequence.cc",
        "if (num_outputs < request.min_output_tokens)",
        "if (num_outputs + 1 < request.min_output_tokens)",
        "runtime_test",
        "*LeastOutput*",
    ),
    Mutant(
        "a stop string inside another's end",
        "runtime/text/text_stream.h",
        "matched_ = borders_[matched_];",
        "matched_ = 0;",
        "runtime_test",
        "*LeastTokens*",
    ),
    Mutant(
        "prompt log-probabilities of the row before",
        "runtime/executor/outputs.cc",
        "LogprobsOf(LogitsOf(item, row), request.prompt[prompt.first + row],",
        "LogprobsOf(LogitsOf(item, std::max<int64_t>(row, 1) - 1), request.prompt[prompt.first + row],",
        "laws_test",
        "*PromptLogprobs*",
    ),
    Mutant(
        "logits of a prompt not reserved",
        "runtime/admission/resolver.cc",
        "request_.demand.prefill_bytes += PromptLogitBytes();",
        "request_.demand.prefill_bytes += 0 * PromptLogitBytes();",
        "runtime_test",
        "*LogitsOfAPrompt*",
    ),
    Mutant(
        "prefixes of all salts are one",
        "runtime/kv/prefix_tree.cc",
        'parent == kNone ? std::string(salt) : ""',
        "std::string()",
        "runtime_test",
        "*SaltsShareNothing*",
    ),
    Mutant(
        "the wait for cores is no part of the pace",
        "runtime/engine/engine.cc",
        "pace_.OnStep(waited + took, done.read, done.told, per_stream);",
        "pace_.OnStep(took, done.read, done.told, per_stream);",
        "runtime_test",
        "*WaitingForCores*",
    ),
    Mutant(
        "what is dropped from the queue is told nothing",
        "runtime/engine/engine_thread.cc",
        "if (ReasonOf(finished.status) == kDeadlineInfeasible) {",
        "if (false) {",
        "runtime_test",
        "*WhatIsDroppedFromTheQueue*",
    ),
    Mutant(
        "memory that pools have reserved is available to others",
        "runtime/base/machine.cc",
        "promised += memory->UntouchedBytes();",
        "promised += 0 * memory->UntouchedBytes();",
        "runtime_test",
        "*IsNotAvailableTwice*",
    ),
    Mutant(
        "the scratch of other models is available",
        "runtime/base/machine.cc",
        "promised += TheReserved().aside;",
        "promised += 0 * TheReserved().aside;",
        "runtime_test",
        "MemorySetAsideTest*",
    ),
    Mutant(
        "one tenant's prompts are all prefilled before the next one's",
        "runtime/engine/scheduler.cc",
        ".older = of_tenant[{s.tenant.data(), s.tenant.size()}]++",
        ".older = 0 * of_tenant[{s.tenant.data(), s.tenant.size()}]++",
        "runtime_test",
        "Plan.OneTenantsPromptsDoNotHoldUpTheOthers",
    ),
    Mutant(
        "a call whose connection closed is taken off twice",
        "server/port/connections.cc",
        "  reading_ -= at->second.reading;\n  open_.erase(at);",
        "  reading_ -= 2 * at->second.reading;\n  open_.erase(at);",
        "server_test",
        "ConnectionsTest.IsWatchedCloselyWhileACallIsRead",
    ),
    Mutant(
        "one tenant fills the queue",
        "runtime/engine/engine_thread.cc",
        " && !IsWithinShare(request.scheduling.tenant, work)",
        "",
        "runtime_test",
        "EngineThreadTest.ATenantHasHisShareOfAQueueThatOthersFill",
    ),
    Mutant(
        "a plan expects each arm to have its share of the units",
        "server/experiments/figures/planner.cc",
        "return units - 2 * std::sqrt(units * (1 - arm.share)) < kLeastUnits ||",
        "return units < kLeastUnits ||",
        "experiments_test",
        "PlanTest.ChanceMayDealAnArmFewerUnitsThanItsShare",
    ),
    Mutant(
        "each subgroup takes all of alpha",
        "server/experiments/figures/comparison.cc",
        "return {.interval = per_arm / counts.classes,",
        "return {.interval = per_arm,",
        "experiments_test",
        "SubgroupReportTest.HasWiderIntervalsThanAnExperimentOfThatSize",
    ),
    Mutant(
        "a covariate that an arm has changed adjusts",
        "server/experiments/figures/comparison.cc",
        "if (estimates.coefficient != 0 && CovariateDiffers(sums)) estimates.coefficient = 0;",
        "",
        "experiments_test",
        "ReportTest.ACovariateThatAnArmHasChangedIsNotUsed",
    ),
    Mutant(
        "one tenant's outcomes fill the recorder's memory",
        "server/experiments/store/recorder.cc",
        "if (!record.has_outcome()) return true;",
        "return true;",
        "stores_test",
        "RecorderTest.OneTenantsOutcomesLeaveTheQueuesRoomToOthers",
    ),
    Mutant(
        "a model's code keeps state in its constants",
        "runtime/model/torchscript_model.cc",
        "if (WritesConstants(graph->block(), aliases)) {",
        "if (false) {",
        "tensors_test",
        "RefusalTest.EveryBrokenFileIsRefusedWithItsReason",
    ),
    Mutant(
        "tenants do not take turns from step to step",
        "runtime/engine/engine.cc",
        "turns_.OnPlanned(views, plan);",
        "",
        "runtime_test",
        "EngineTest.PromptsOfOneTenantDoNotHoldUpAnothers",
    ),
    Mutant(
        "who comes goes before those who wait",
        "runtime/engine/scheduler.cc",
        "now.try_emplace(std::string(s.tenant), time_)",
        "now.try_emplace(std::string(s.tenant), 0)",
        "runtime_test",
        "PrefillTurns.*",
    ),
    Mutant(
        "a prefix is kept although something of it was evicted",
        "runtime/kv/prefix_cache.cc",
        "SharesRows(request) && cache.Untouched();",
        "SharesRows(request);",
        "laws_test",
        "*PromptsOverTheBudget*gqa_Sliding*",
    ),
    Mutant(
        "completions draw alike",
        "runtime/sampling/sampler.cc",
        "of.seed += static_cast<uint64_t>(completion);",
        "",
        "laws_test",
        "*gqa_Sliding*",
    ),
    Mutant(
        "the sequence that parts keeps the whole reservation",
        "runtime/engine/engine.cc",
        "if ((item.ends_prefill || item.pass) && s.cached == s.request.prefill_tokens()) {\n    ledger_.Shrink",
        "if (item.ends_prefill && item.completions == 1) {\n    ledger_.Shrink",
        "runtime_test",
        "*Completions*",
    ),
    Mutant(
        "the first delta waits",
        "server/stream/outbox.cc",
        "if (!first && waiting_.empty()) due_",
        "if (waiting_.empty()) due_",
        "server_test",
        "*TheEndSends*",
    ),
    Mutant(
        "a delta waits for an end that has come",
        "server/stream/outbox.cc",
        "!end_.has_value() && !full_since_",
        "!full_since_",
        "server_test",
        "*AFailureSends*",
    ),
    Mutant(
        "a full outbox waits",
        "server/stream/outbox.cc",
        "&& !full_since_.has_value() && now_() < due_",
        "&& now_() < due_",
        "server_test",
        "*AFullOutbox*",
    ),
    Mutant(
        "a part reaches into the next",
        "runtime/base/parallel_for.h",
        "      run(begin, end);\n",
        "      run(begin, std::min(count, end + (threads > 1)));\n",
        "tensors_test",
        "*EachIsThereOnce*",
    ),
    Mutant(
        "threads share what a product sums in",
        "runtime/model/blocked_linear.cc",
        "thread_local std::vector<float> memory;",
        "static std::vector<float> memory(rows * block);",
        "laws_test",
        "*GiveTheBitsOfOne*",
    ),
    Mutant(
        "a product leaves out an input of those it takes at once",
        "runtime/kernels/dense_tiles.inc",
        "std::min(at_once, num_words - begin)",
        "std::min(at_once - 1, num_words - begin)",
        "runtime_test",
        "*SumsOfSmallIntegersAreExact*",
    ),
    Mutant(
        "a packed weight's outputs lie backwards",
        "runtime/kernels/dense_matmul.cc",
        "std::memcpy(to + w * kBlock + o, row",
        "std::memcpy(to + w * kBlock + (outputs - 1 - o), row",
        "runtime_test",
        "*SumsOfSmallIntegersAreExact*",
    ),
    Mutant(
        "a completion forgets what its parent has cached",
        "runtime/step/step_item.h",
        "        tapped(from.tapped),\n        prefix(from.prefix) {",
        "        tapped(from.tapped) {",
        "laws_test",
        "*KeepsWhatItHasCached*",
    ),
    Mutant(
        "decode rows of another layer's logits",
        "runtime/attention/attention.cc",
        "    if (item.logits != nullptr) item.logits->clear();  // another layer's, or another step's\n",
        "",
        "differential_test",
        "*rows_of_their_own_layer*",
    ),
    Mutant(
        "padding is what lay there",
        "runtime/attention/attention.cc",
        "  if (end < q.size(0)) out.narrow(0, end, q.size(0) - end).zero_();  // padding\n",
        "",
        "tensors_test",
        "*LeavesZero*",
    ),
    Mutant(
        "books before rows",
        "runtime/kv/kv_pool.cc",
        "  RowAllocator::Placement placement = rows_.Plan(id, rows);\n  Copy(placement.moves);\n",
        "  RowAllocator::Placement placement = rows_.Plan(id, rows);\n"
        "  const std::vector<RowMove> moves = placement.moves;\n"
        "  rows_.Place(std::move(placement));\n  Copy(moves);\n  return;\n",
        "injected_failures_test",
        "*DeviceTensorsOpen*",
    ),
    Mutant(
        "rows that a failed move has moved stay there",
        "runtime/kv/kv_pool.cc",
        "      while (done-- > 0) {\n",
        "      while (false) {\n",
        "injected_failures_test",
        "*DeviceTensorsFork*",
    ),
    Mutant(
        "a device's residuals count at once",
        "runtime/forward/device_forward.cc",
        "    item.tapped = now.narrow(0, first, count);\n",
        "    item.tapped = item.sequence->tapped = now.narrow(0, first, count);\n",
        "injected_failures_test",
        "*DeviceObjectsForward*",
    ),
    Mutant(
        "deterministic mode takes the fastest kernel",
        "runtime/attention/kernel_choice.h",
        "  if (pinned) {",
        "  if (false) {",
        "runtime_test",
        "*",
    ),
    Mutant(
        "forecasts learn from idle requests",
        "runtime/engine/engine.cc",
        "  if (s.open && &s != idle_.get()) {",
        "  if (s.open) {",
        "runtime_test",
        "*ForecastsLearnNothingFromTheEnd*",
    ),
    Mutant(
        "a completion keeps of its constraint what it likes where memory is scarce",
        "runtime/constraints/constraint.cc",
        "    if (share_->left() >= 0 && share_->IsFull() && spare_work_ < kSpareWork) {",
        "    if (false) {",
        "runtime_test",
        "*CompletionsKeepNoMoreThanTheirTextAllowsWhereMemoryIsScarce*",
    ),
    Mutant(
        "constraints grow beyond all limits as long as each keeps what its text allows",
        "runtime/constraints/constraint.cc",
        "    if (share_->MustShrink()) {",
        "    if (false) {",
        "runtime_test",
        "ConstraintTest.BeyondTheLimitOneCompletionEndsForTheOthers",
    ),
    Mutant(
        "a thread of gRPC compiles what its model has forgotten",
        "server/generation/request_preparer.cc",
        "if (!constraint.has_value()) return MustWait();",
        "",
        "server_test",
        "RequestPreparerTest.AThreadThatMayNotCompileIsToldTo",
    ),
]


def run(command: list[str], check: bool = False, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command, check=check, capture_output=True, text=True, **kwargs)


def prepare(build: Path, work: Path) -> Path:
    """A copy of the tracked files, and a build folder configured as `build` is."""
    source = work / "source"
    source.mkdir(parents=True, exist_ok=True)
    for name in run(["git", "ls-files"], cwd=ROOT, check=True).stdout.splitlines():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            shutil.copyfile(ROOT / name, target)
    cache = (build / "CMakeCache.txt").read_text()
    settings = re.findall(
        r"^(EPIKV_(?:TORCH_DIR|PYTHON|XGRAMMAR_SDIST)):\w+=(.+)$", cache, re.MULTILINE
    )
    # A fault may leave a variable unused.
    flags = [f"-D{key}={value}" for key, value in settings] + ["-DEPIKV_WERROR=OFF"]
    into = ["-S", str(source), "-B", str(work / "build"), "-G", "Ninja"]
    run(["cmake", "--fresh", *into, *flags], check=True)
    return source


def turns_red(mutant: Mutant, source: Path, build: Path, jobs: int) -> str:
    """What came of it: "red", or what is wrong."""
    file = source / mutant.file
    original = file.read_text()
    if original.count(mutant.old) != 1:
        return f"the fault has no place: {mutant.old!r} occurs {original.count(mutant.old)} times"
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        built = run(["cmake", "--build", str(build), "-j", str(jobs), "--target", mutant.binary])
        if built.returncode != 0:
            return "does not build:\n" + (built.stdout + built.stderr)[-2000:]
        test = [str(build / "tests" / mutant.binary), f"--gtest_filter={mutant.filter}"]
        try:
            result = run(test, timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return "red"  # it waits for what the fault has taken away
        if "Running 0 tests" in result.stdout:
            return f"no test matches {mutant.filter}"
        return "red" if result.returncode != 0 else "GREEN: no test saw it"
    finally:
        file.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "dev")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--only", help="a test's binary, or a part of what faults are called")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    source = prepare(arguments.build, arguments.work)
    survived = 0
    for mutant in MUTANTS:
        if arguments.only != mutant.binary and (arguments.only or "") not in mutant.name:
            continue
        outcome = turns_red(mutant, source, arguments.work / "build", arguments.jobs)
        survived += outcome != "red"
        print(f"{mutant.name:<40} {mutant.binary:<16} {outcome}", flush=True)
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
