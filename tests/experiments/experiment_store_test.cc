#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/steady_time.h"
#include "server/experiments/store/schema.h"
#include "server/experiments/store/sql_store.h"
#include "tests/fixtures/experiment_records.h"
#include "tests/fixtures/store_places.h"

namespace epikv {
namespace experiment_store_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

using Records = std::vector<v1::ExperimentRecord>;
constexpr SqlTimeouts kShort = {.connect = absl::Milliseconds(500),
                                .statement = absl::Milliseconds(300),
                                .transaction = absl::Milliseconds(600)};
constexpr absl::Duration kLittle = absl::Seconds(20);  // far above kShort, below a hang

std::vector<Recorded> Written(Store& store, const Records& records, Source source = Source::kNow) {
  absl::StatusOr<WriteResult> result = store.Write(records, source);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? std::move(result->records) : std::vector<Recorded>();
}

// Once it is back: a machine that does much else may be slower than kShort for a while.
template <typename Call>
auto AwaitAvailable(Call call) -> decltype(call()) {
  const absl::Duration give_up = SteadyTime() + kLittle;
  for (;;) {
    auto result = call();
    if (!absl::IsUnavailable(result.status()) || SteadyTime() > give_up) return result;
  }
}

std::vector<RequestRow> RowsOf(Store& store, const Reading& reading = {.experiment = "x"}) {
  std::vector<RequestRow> rows;
  const absl::Status status = store.ReadRequests(reading, [&rows](const RequestRow& row) {
    rows.push_back(row);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return rows;
}

std::vector<v1::Experiment> ExperimentsOf(Store& store) {
  absl::StatusOr<Definitions> definitions = store.Experiments();
  EXPECT_TRUE(definitions.ok()) << definitions.status();
  return definitions.ok() ? definitions->experiments : std::vector<v1::Experiment>();
}

// "request: metric/key=value ..." of each, in the order in which they come.
std::vector<std::string> Picture(Store& store, const std::string& experiment = "x") {
  std::vector<std::string> lines;
  for (const RequestRow& row : RowsOf(store, {.experiment = experiment})) {
    std::string line = absl::StrCat(row.id, ":");
    for (const OutcomeRow& outcome : row.outcomes) {
      absl::StrAppend(&line, " ", outcome.metric, "/", outcome.key, "=", outcome.value);
    }
    lines.push_back(line);
  }
  return lines;
}

class ExperimentStoreTest : public ::testing::TestWithParam<StoreKind> {
 protected:
  void SetUp() override {
    store_ = place_->Open();
    ASSERT_NE(store_, nullptr);
    ASSERT_TRUE(store_->Create(Definition({.name = "x"})).ok());
  }
  // As it was before the schema's version 4.
  void DropPairs() {
    place_->Execute("DROP TABLE pairs");
    place_->Execute("ALTER TABLE participations DROP COLUMN pair_arm");
  }
  std::unique_ptr<StorePlace> place_ = GetParam().make();
  std::unique_ptr<Store> store_;
};

INSTANTIATE_TEST_SUITE_P(Stores, ExperimentStoreTest, ::testing::Values(kSqlite, kPostgres),
                         NameOf);

TEST_P(ExperimentStoreTest, KeepsEverythingOfARequest) {
  Written(*store_, {Record(Begun{.id = "r", .client = "c", .at = 10.25}), Ended("r", 11)});
  Written(*store_, {Record(Seen{.client = "c", .at = 12, .value = 1.0 / 3, .key = "k"})});
  EXPECT_EQ(RowsOf(*store_).at(0).shadow.has_value(), false);
  Written(*store_, {Compared("r", 1000)});  // whenever there is time for it
  store_ = place_->Open();
  const std::vector<RequestRow> rows = RowsOf(*store_);
  ASSERT_THAT(rows, SizeIs(1));
  const RequestRow& row = rows[0];
  EXPECT_EQ(row.id, "r");
  EXPECT_EQ(row.unit, 0xfedcba9876543210);
  EXPECT_FALSE(row.unit_is_request);
  EXPECT_EQ(row.model, "m");
  EXPECT_EQ(row.began, TimeOf(Second(10.25)));
  EXPECT_EQ(row.prompt_tokens, 7);
  EXPECT_EQ(row.max_output_tokens, 100);
  EXPECT_EQ(row.covariate, std::nullopt);
  EXPECT_EQ(row.bucket_version, 2u);
  EXPECT_EQ(row.arm, "a");
  EXPECT_FALSE(row.forced);
  EXPECT_TRUE(row.exposed);
  ASSERT_TRUE(row.end.has_value());
  EXPECT_EQ(row.end->code, "OK");
  EXPECT_EQ(row.end->finish_reason, "length");
  EXPECT_EQ(row.end->request_seconds, 1.0 / 3);
  EXPECT_EQ(row.end->output_tokens, 9);
  EXPECT_EQ(row.end->kv_peak_tokens, std::nullopt);
  EXPECT_EQ(row.end->kv_evicted_tokens, 4);
  EXPECT_EQ(row.end->ttft_seconds, std::nullopt);
  ASSERT_THAT(row.outcomes, SizeIs(1));
  EXPECT_EQ(row.outcomes[0].value, 1.0 / 3);
  EXPECT_EQ(row.outcomes[0].key, "k");
  EXPECT_EQ(row.outcomes[0].received, TimeOf(Second(12)));
  ASSERT_TRUE(row.shadow.has_value());
  EXPECT_EQ(row.shadow->tokens, 9);
  EXPECT_EQ(row.shadow->agreed_tokens, 8);
  EXPECT_EQ(row.shadow->kl_nats, 1.0 / 3);
}

TEST_P(ExperimentStoreTest, WhatIsThereChangesNothing) {
  const Records records = {Record(Begun{.id = "r", .at = 1}), Ended("r", 2),
                           Record(Seen{.client = "r", .at = 3}), Compared("r", 4)};
  EXPECT_THAT(Written(*store_, records), ElementsAre(Recorded::kWritten, Recorded::kWritten,
                                                     Recorded::kWritten, Recorded::kWritten));
  for (Source source : {Source::kNow, Source::kSpool}) {
    EXPECT_THAT(Written(*store_, records, source),
                ElementsAre(Recorded::kDuplicate, Recorded::kDuplicate, Recorded::kDuplicate,
                            Recorded::kDuplicate));
  }
  EXPECT_THAT(Picture(*store_), ElementsAre("r: good/=1"));
}

TEST_P(ExperimentStoreTest, ARecordTwiceInOneBatchIsThereOnce) {
  const v1::ExperimentRecord began = Record(Begun{.id = "r", .at = 1}), ended = Ended("r", 2);
  const v1::ExperimentRecord outcome = Record(Seen{.client = "r", .at = 3});
  EXPECT_THAT(Written(*store_, {began, began, ended, ended, outcome, outcome}),
              ElementsAre(Recorded::kWritten, Recorded::kDuplicate, Recorded::kWritten,
                          Recorded::kDuplicate, Recorded::kWritten, Recorded::kDuplicate));
}

TEST_P(ExperimentStoreTest, SaysWhatBecameOfEachOutcome) {
  EXPECT_THAT(
      Written(*store_, {Record(Begun{.id = "r", .at = 10}),
                        Record(Seen{.client = "r", .at = 11, .value = 0.5}),
                        Record(Seen{.client = "r", .at = 12, .value = 0.5}),
                        Record(Seen{.client = "r", .at = 12, .value = 0.25}),
                        Record(Seen{.client = "r", .at = 12, .value = 0.25, .key = "other"}),
                        Record(Seen{.client = "nobody", .at = 12}),
                        Record(Seen{.client = "r", .at = 12, .tenant = "stranger"}),
                        Record(Seen{.client = "r", .at = 110, .key = "just in time"}),
                        Record(Seen{.client = "r", .at = 110.000001, .key = "late"}),
                        Record(Seen{.client = "r", .at = 500, .value = 0.5}),
                        Record(Seen{.client = "r", .at = 12, .metric = "unheard"})}),
      ElementsAre(Recorded::kWritten, Recorded::kWritten, Recorded::kDuplicate, Recorded::kConflict,
                  Recorded::kWritten, Recorded::kUnknownRequest, Recorded::kUnknownRequest,
                  Recorded::kWritten, Recorded::kLate, Recorded::kDuplicate,
                  Recorded::kUndeclaredMetric));
  EXPECT_THAT(Picture(*store_), ElementsAre("r: good/=0.5 good/just in time=1 good/other=0.25"));
}

TEST_P(ExperimentStoreTest, WhatNoStoreCanHoldIsInvalidAndAlone) {
  v1::ExperimentRecord no_parts = Record(Begun{.id = "r"});
  no_parts.mutable_began()->clear_parts();
  EXPECT_THAT(
      Written(*store_,
              {v1::ExperimentRecord(), no_parts, Record(Begun{.id = ""}),
               Record(Begun{.id = "r", .client = std::string("c\0d", 3), .at = 1}),
               Record(Seen{.client = "r", .value = std::numeric_limits<double>::infinity()}),
               Record(Begun{.id = "r", .at = 1})}),
      ElementsAre(Recorded::kInvalid, Recorded::kInvalid, Recorded::kInvalid, Recorded::kInvalid,
                  Recorded::kInvalid, Recorded::kWritten));
}

TEST_P(ExperimentStoreTest, AnEndOfAnUnknownRequestIsNotKept) {
  EXPECT_THAT(Written(*store_, {Ended("r", 1), Record(Begun{.id = "r"})}),
              ElementsAre(Recorded::kUnknownRequest, Recorded::kWritten));
  EXPECT_FALSE(RowsOf(*store_)[0].end.has_value());
}

TEST_P(ExperimentStoreTest, AReplayIsOfTheRequestThatTheServerNames) {
  Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10}), Compared("1", 30)});
  // Outcomes of the client's id move to it; what was measured stays.
  Written(*store_, {Record(Begun{.id = "2", .client = "c", .at = 20})}, Source::kSpool);
  EXPECT_THAT(Written(*store_, {Compared("3", 1), Compared("2", 40), Compared("2", 41)}),
              ElementsAre(Recorded::kUnknownRequest, Recorded::kWritten, Recorded::kDuplicate));
  v1::ExperimentRecord empty = Compared("1", 1), broken = Compared("1", 1);
  empty.mutable_shadow()->set_tokens(0);
  broken.mutable_shadow()->set_kl_nats(std::numeric_limits<double>::infinity());
  EXPECT_THAT(Written(*store_, {empty, broken}),
              ElementsAre(Recorded::kInvalid, Recorded::kInvalid));
  for (const RequestRow& row : RowsOf(*store_)) EXPECT_TRUE(row.shadow.has_value()) << row.id;
}

TEST_P(ExperimentStoreTest, APairIsSettledOnce) {
  v1::ExperimentRecord began = Record(Begun{.id = "kept", .at = 1});
  began.mutable_began()->mutable_parts(0)->set_pair_arm("b");
  Written(*store_,
          {began, Record(Begun{.id = "lost", .at = 2}), Record(Begun{.id = "none", .at = 3})});
  EXPECT_THAT(Written(*store_, {Paired("kept", 4, .25, .125), Paired("kept", 5), Paired("lost", 6),
                                Paired("lost", 7, 1, 1), Paired("nobody", 8)}),
              ElementsAre(Recorded::kWritten, Recorded::kDuplicate, Recorded::kWritten,
                          Recorded::kDuplicate, Recorded::kUnknownRequest));
  store_ = place_->Open();
  const std::vector<RequestRow> rows = RowsOf(*store_);
  ASSERT_THAT(rows, SizeIs(3));
  EXPECT_EQ(rows[0].pair_arm, "b");
  EXPECT_EQ(rows[0].pair->shown->tokens, 100);
  EXPECT_EQ(rows[0].pair->shown->agreed_tokens, 90);
  EXPECT_EQ(rows[0].pair->shown->kl_nats, 25);
  EXPECT_EQ(rows[0].pair->hidden->kl_nats, 12.5);
  EXPECT_FALSE(rows[0].shadow.has_value()) << "it is no replay of a sampled request";
  EXPECT_EQ(rows[1].pair_arm, "");
  ASSERT_TRUE(rows[1].pair.has_value());
  EXPECT_FALSE(rows[1].pair->shown.has_value() || rows[1].pair->hidden.has_value());
  EXPECT_FALSE(rows[2].pair.has_value());
}

TEST_P(ExperimentStoreTest, HalfAPairIsInvalid) {
  Written(*store_, {Record(Begun{.id = "r"})});
  v1::ExperimentRecord half = Paired("r", 1, 1, 1), empty = half, broken = half;
  half.mutable_pair()->clear_hidden();
  empty.mutable_pair()->mutable_shown()->set_tokens(0);
  broken.mutable_pair()->mutable_hidden()->set_kl_nats(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(Written(*store_, {half, empty, broken}),
              ElementsAre(Recorded::kInvalid, Recorded::kInvalid, Recorded::kInvalid));
  EXPECT_FALSE(RowsOf(*store_).at(0).pair.has_value());
}

TEST_P(ExperimentStoreTest, TextsAndNumbersComeBackAsTheyWere) {
  const std::string odd = "'; -- \\ \" \n \t $1 ?1 % _ \xc3\xa4\xf0\x9f\x98\x80";
  v1::ExperimentRecord began = Record(Begun{.id = odd, .client = odd, .arm = odd, .tenant = odd});
  began.mutable_began()->set_covariate(5e-324);
  began.mutable_began()->set_unit(std::numeric_limits<uint64_t>::max());
  began.mutable_began()->mutable_parts(0)->set_subgroup(odd);
  Written(*store_, {began});
  for (double value : {0.1, -0.0, 1e308, 5e-324, 3.0}) {
    const v1::ExperimentRecord outcome = Record(
        Seen{.client = odd, .at = 1, .value = value, .key = absl::StrCat(value), .tenant = odd});
    EXPECT_THAT(Written(*store_, {outcome, outcome}),
                ElementsAre(Recorded::kWritten, Recorded::kDuplicate));
  }
  const RequestRow row = RowsOf(*store_).at(0);
  EXPECT_EQ(row.id, odd);
  EXPECT_EQ(row.arm, odd);
  EXPECT_EQ(row.subgroup, odd);
  EXPECT_EQ(row.covariate, 5e-324);
  EXPECT_EQ(row.unit, std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(row.outcomes, SizeIs(5));
}

TEST_P(ExperimentStoreTest, AnErrorLeavesNothingOfItsBatch) {
  // Not UTF-8: PostgreSQL takes none of it; SQLite takes whatever it is given.
  v1::ExperimentRecord broken = Record(Begun{.id = "b", .client = "\xff"});
  const absl::Status status =
      store_->Write(Records{Record(Begun{.id = "r"}), broken}, Source::kNow).status();
  if (GetParam().name == kSqlite.name) {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_THAT(RowsOf(*store_), SizeIs(2));
    return;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(RowsOf(*store_), IsEmpty());
  EXPECT_THAT(Written(*store_, {Record(Begun{.id = "r"})}), ElementsAre(Recorded::kWritten));
}

// Outcomes and their requests.

TEST_P(ExperimentStoreTest, AnOutcomeIsOfTheNewestRequestOfItsId) {
  Written(*store_,
          {Record(Begun{.id = "1", .client = "c", .at = 10}), Record(Seen{.client = "c", .at = 11}),
           Record(Begun{.id = "2", .client = "c", .at = 12}),
           Record(Seen{.client = "c", .at = 13, .value = 2})});
  EXPECT_THAT(Picture(*store_), ElementsAre("1: good/=1", "2: good/=2"));
}

TEST_P(ExperimentStoreTest, ASpoolIsJoinedAsItWouldHaveBeenThen) {
  Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10}),
                    Record(Begun{.id = "2", .client = "c", .at = 20})});
  Written(*store_, {Record(Seen{.client = "c", .at = 15})}, Source::kSpool);
  EXPECT_THAT(Picture(*store_), ElementsAre("1: good/=1", "2:"));
}

TEST_P(ExperimentStoreTest, OfAnIdUsedForEverTheRightRequestIsFound) {
  Records records;
  for (int i = 0; i < 100; ++i) {
    records.push_back(Record(Begun{.id = absl::StrCat(100 + i), .client = "c", .at = i * 1.0}));
  }
  Written(*store_, records);
  Written(*store_, {Record(Seen{.client = "c", .at = 41.5, .value = 41})}, Source::kSpool);
  Written(*store_, {Record(Seen{.client = "c", .at = 99.5, .value = 99})});
  EXPECT_THAT(Picture(*store_)[41], "141: good/=41");
  EXPECT_THAT(Picture(*store_)[99], "199: good/=99");
}

TEST_P(ExperimentStoreTest, OfAnIdUsedForEverTheRightRequestIsFoundInOneBatch) {
  constexpr int kMany = 1500;
  Records records;
  for (int i = 0; i < kMany; ++i) {
    const double at = i * 0.01;
    records.push_back(Record(Begun{.id = absl::StrCat(10000 + i), .client = "c", .at = at}));
    records.push_back(Record(Seen{.client = "c", .at = at + 0.001, .value = i + 1.0}));
  }
  for (int again = 0; again < 2; ++again) Written(*store_, records, Source::kSpool);
  const std::vector<RequestRow> rows = RowsOf(*store_);
  ASSERT_THAT(rows, SizeIs(kMany));
  for (int i = 0; i < kMany; ++i) {
    ASSERT_THAT(rows[i].outcomes, SizeIs(1));
    EXPECT_EQ(rows[i].outcomes[0].value, i + 1.0);
  }
}

TEST_P(ExperimentStoreTest, ARequestAheadOfItsOutcomesClockKeepsIt) {
  for (Source source : {Source::kNow, Source::kSpool}) {
    const std::string id = source == Source::kNow ? "now" : "spool";
    Written(*store_, {Record(Begun{.id = id, .at = 3600})}, source);
    EXPECT_THAT(Written(*store_, {Record(Seen{.client = id, .at = 1})}, source),
                ElementsAre(Recorded::kWritten));
  }
}

TEST_P(ExperimentStoreTest, ToldNowNoClockMovesAnOutcomeToAnOlderRequest) {
  Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10})});
  Written(*store_, {Record(Begun{.id = "2", .client = "c", .at = 60})});
  Written(*store_, {Record(Seen{.client = "c", .at = 55})});  // by a clock 10 s behind
  EXPECT_THAT(Picture(*store_), ElementsAre("1:", "2: good/=1"));
}

TEST_P(ExperimentStoreTest, ACommitOfUnknownFateIsNotCountedTwice) {
  Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10}),
                    Record(Begun{.id = "2", .client = "c", .at = 60})});
  const v1::ExperimentRecord outcome = Record(Seen{.client = "c", .at = 55});
  Written(*store_, {outcome});
  EXPECT_THAT(Written(*store_, {outcome}, Source::kSpool), ElementsAre(Recorded::kDuplicate));
  EXPECT_THAT(Picture(*store_), ElementsAre("1:", "2: good/=1"));
}

TEST_P(ExperimentStoreTest, AnAcknowledgedOutcomeWaitsForItsRequest) {
  EXPECT_THAT(Written(*store_,
                      {Record(Seen{.client = "c", .at = 15}),
                       Record(Seen{.client = "c", .at = 500, .key = "late"})},
                      Source::kSpool),
              ElementsAre(Recorded::kWaiting, Recorded::kWaiting));
  EXPECT_THAT(Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10})}),
              ElementsAre(Recorded::kWritten));
  EXPECT_THAT(Picture(*store_), ElementsAre("1: good/=1"));
  EXPECT_THAT(place_->Execute("SELECT * FROM waiting_outcomes"), IsEmpty());
}

// Of requests that do not exist anybody may send any number.
TEST_P(ExperimentStoreTest, NotAnyNumberOfOutcomesWaits) {
  constexpr int kMostOfTenant = 25'000;
  auto flood = [this](const std::string& tenant, int first, int count) {
    std::vector<v1::ExperimentRecord> records;
    for (int i = first; i < first + count; ++i) {
      records.push_back(Record(Seen{.client = absl::StrCat("none", i), .tenant = tenant}));
    }
    return Written(*store_, records, Source::kSpool);
  };
  for (int i = 0; i < kMostOfTenant; i += 5000) {
    EXPECT_THAT(flood("eve", i, 5000), Each(Recorded::kWaiting));
  }
  EXPECT_THAT(flood("eve", kMostOfTenant, 3), Each(Recorded::kUnknownRequest));
  EXPECT_THAT(flood("ann", 0, 3), Each(Recorded::kWaiting));
}

TEST_P(ExperimentStoreTest, ARequestThatComesLaterFromASpoolGetsItsOutcomes) {
  Written(*store_, {Record(Begun{.id = "1", .client = "c", .at = 10}),
                    Record(Seen{.client = "c", .at = 15})});
  Written(*store_, {Record(Seen{.client = "c", .at = 25, .value = 2, .key = "k"})}, Source::kSpool);
  Written(*store_, {Record(Begun{.id = "2", .client = "c", .at = 20})}, Source::kSpool);
  EXPECT_THAT(Picture(*store_), ElementsAre("1: good/=1", "2: good/k=2"));
}

TEST_P(ExperimentStoreTest, RequestsThatComeTogetherPassOutcomesOn) {
  Written(
      *store_,
      {Record(Begun{.id = "3", .client = "c", .at = 30}), Record(Seen{.client = "c", .at = 15})},
      Source::kSpool);
  Written(*store_,
          {Record(Begun{.id = "1", .client = "c", .at = 10}),
           Record(Begun{.id = "2", .client = "c", .at = 20})},
          Source::kSpool);
  EXPECT_THAT(Picture(*store_), ElementsAre("1: good/=1", "2:", "3:"));
}

// What spools of replicas leave does not depend on whose comes first, nor on what comes twice.
TEST_P(ExperimentStoreTest, SpoolsMayComeInAnyOrderAndTwice) {
  std::mt19937 random(7);
  std::vector<Records> replicas(3);
  std::map<std::string, int> uses;
  int outcomes = 0;
  double now = 0;
  for (int i = 0; i < 60; ++i) {
    now += 1;
    const std::string client = absl::StrCat("c", random() % 12);
    Records& at = replicas[random() % replicas.size()];
    if (uses[client] == 0 || random() % 3 == 0) {
      ++uses[client];
      const std::string id = absl::StrCat(client, "-", i);
      at.push_back(Record(Begun{.id = id, .client = client, .at = now}));
      at.push_back(Ended(id, now + 0.5));
    } else {
      ++outcomes;
      at.push_back(Record(Seen{.client = client, .at = now, .value = now, .key = absl::StrCat(i)}));
    }
  }
  std::vector<std::string> expected;
  for (int round = 0; round < 8; ++round) {
    const std::unique_ptr<StorePlace> place = GetParam().make();
    const std::unique_ptr<Store> store = place->Open();
    ASSERT_TRUE(store->Create(Definition({.name = "x", .window = absl::Hours(1)})).ok());
    std::vector<size_t> done(replicas.size());
    while (done !=
           std::vector<size_t>{replicas[0].size(), replicas[1].size(), replicas[2].size()}) {
      const size_t replica = random() % replicas.size();
      const Records& all = replicas[replica];
      const size_t end = std::min(all.size(), done[replica] + 1 + random() % 9);
      const size_t begin = done[replica] - random() % (done[replica] + 1);  // a crash: again
      Written(*store, Records(all.begin() + begin, all.begin() + end), Source::kSpool);
      done[replica] = end;
    }
    if (round == 0) expected = Picture(*store);
    EXPECT_EQ(Picture(*store), expected) << "round " << round;
  }
  for (const std::string& line : expected) {
    outcomes -= static_cast<int>(std::count(line.begin(), line.end(), '='));
  }
  EXPECT_EQ(outcomes, 0) << "lost";
}

// Definitions.

TEST_P(ExperimentStoreTest, DefinitionsHaveEtagsAndARevision) {
  const int64_t before = *store_->Revision();
  const absl::StatusOr<v1::Experiment> made = store_->Create(Definition({.name = "b"}));
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_FALSE(made->etag().empty());
  EXPECT_GT(*store_->Revision(), before);
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Create(*made).status()));
  v1::Experiment changed = *made;
  changed.set_hypothesis("better");
  const absl::StatusOr<v1::Experiment> replaced = store_->Replace(changed, made->etag());
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_NE(replaced->etag(), made->etag());
  EXPECT_TRUE(absl::IsAborted(store_->Replace(changed, made->etag()).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Replace(Definition({.name = "no"}), "").status()));
  const std::unique_ptr<Store> other = place_->Open();
  const absl::StatusOr<Definitions> all = other->Experiments();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->revision, *store_->Revision());
  ASSERT_THAT(all->experiments, SizeIs(2));
  EXPECT_EQ(all->experiments[0].SerializeAsString(), replaced->SerializeAsString());
  EXPECT_EQ(all->experiments[1].name(), "x");
}

TEST_P(ExperimentStoreTest, DefinitionsAreInTheOrderOfTheirNames) {
  for (const char* name : {"a-b", "ab", "a"}) {
    ASSERT_TRUE(store_->Create(Definition({.name = name})).ok());
  }
  std::vector<std::string> names;
  for (const v1::Experiment& each : ExperimentsOf(*store_)) names.push_back(each.name());
  EXPECT_THAT(names, ElementsAre("a", "a-b", "ab", "x"));
}

TEST_P(ExperimentStoreTest, AnEditThatRefusesChangesNothing) {
  const int64_t before = *store_->Revision();
  auto refuse = [](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
    EXPECT_THAT(all, SizeIs(1));
    return absl::OutOfRangeError("full");
  };
  EXPECT_EQ(store_->Change("x", refuse).status(), absl::OutOfRangeError("full"));
  EXPECT_TRUE(absl::IsNotFound(store_->Change("y", refuse).status()));
  EXPECT_EQ(*store_->Revision(), before);
}

TEST_P(ExperimentStoreTest, AChangedDefinitionDecidesAtOnce) {
  const std::unique_ptr<Store> other = place_->Open();
  Written(*other, {Record(Begun{.id = "r", .at = 1})});
  auto declare = [](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
    v1::Experiment changed = all[0];
    changed.add_metrics()->set_name("later");
    return changed;
  };
  ASSERT_TRUE(store_->Change("x", declare).ok());
  EXPECT_THAT(Written(*other, {Record(Seen{.client = "r", .at = 2, .metric = "later"})}),
              ElementsAre(Recorded::kWritten));
}

// Replicas start experiments of one layer at the same time.
TEST_P(ExperimentStoreTest, StartsOfOneLayerTakeDifferentBuckets) {
  constexpr uint32_t kEach = 1000;
  constexpr int kStarts = 9;
  for (int i = 0; i < kStarts; ++i) {
    ASSERT_TRUE(store_->Create(Definition({.name = absl::StrCat("e", i)})).ok());
  }
  std::vector<std::thread> replicas;
  for (int i = 0; i < kStarts; ++i) {
    replicas.emplace_back([this, i] {
      const std::unique_ptr<Store> store = place_->Open();
      const std::string name = absl::StrCat("e", i);
      auto start =
          [&name](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
        uint32_t first = 0;
        v1::Experiment mine;
        for (const v1::Experiment& each : all) {
          if (each.name() == name) mine = each;
          if (each.first_bucket() > 0) first = std::max(first, each.first_bucket() + kEach - 1);
        }
        mine.set_first_bucket(first + 1);
        return mine;
      };
      const absl::Status status = store->Change(name, start).status();
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& replica : replicas) replica.join();
  std::vector<uint32_t> taken;
  for (const v1::Experiment& each : ExperimentsOf(*store_)) {
    if (each.first_bucket() > 0) taken.push_back(each.first_bucket());
  }
  EXPECT_THAT(taken, UnorderedElementsAre(1, 1001, 2001, 3001, 4001, 5001, 6001, 7001, 8001));
}

TEST_P(ExperimentStoreTest, WritersOfManyReplicasLoseNothing) {
  constexpr int kWriters = 6, kBatches = 15;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([this, writer] {
      const std::unique_ptr<Store> store = place_->Open();
      for (int i = 0; i < kBatches; ++i) {
        const std::string own = absl::StrCat(writer, "-", i);
        Written(*store, {Record(Begun{.id = own, .at = i * 1.0}),
                         Record(Seen{.client = own, .at = i + 0.5}),
                         Record(Begun{.id = absl::StrCat("shared", i), .at = i * 1.0}),
                         Record(Seen{.client = absl::StrCat("shared", i), .at = i + 0.5})});
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::vector<std::string> picture = Picture(*store_);
  EXPECT_THAT(picture, SizeIs((kWriters + 1) * kBatches));
  for (const std::string& line : picture) EXPECT_THAT(line, HasSubstr("good/=1"));
}

// Reading.

TEST_P(ExperimentStoreTest, RowsComeOnceAndInTheOrderOfTime) {
  constexpr int kMany = 3001;  // some pages; two of each moment
  Records records;
  for (int i = 0; i < kMany; ++i) {
    const std::string id = absl::StrCat(10000 + i);
    records.push_back(Record(Begun{.id = id, .at = i / 2 * 1.0}));
    if (i % 3 == 0) records.push_back(Record(Seen{.client = id, .at = i * 1.0, .key = "1"}));
    if (i % 9 == 0) records.push_back(Record(Seen{.client = id, .at = i * 1.0, .key = "2"}));
  }
  ASSERT_TRUE(store_
                  ->Replace(Definition({.name = "x", .window = absl::Hours(9)}),
                            ExperimentsOf(*store_)[0].etag())
                  .ok());
  Written(*store_, records);
  const std::vector<RequestRow> rows = RowsOf(*store_);
  ASSERT_THAT(rows, SizeIs(kMany));
  for (int i = 0; i < kMany; ++i) {
    ASSERT_EQ(rows[i].id, absl::StrCat(10000 + i));
    ASSERT_THAT(rows[i].outcomes, SizeIs(i % 9 == 0 ? 2 : i % 3 == 0 ? 1 : 0)) << i;
  }
  EXPECT_THAT(
      RowsOf(*store_,
             {.experiment = "x", .from = TimeOf(Second(100)), .until = TimeOf(Second(102))}),
      SizeIs(4));
}

TEST_P(ExperimentStoreTest, AnExperimentSeesItsOwnMetricsWithinItsOwnWindow) {
  ASSERT_TRUE(store_->Create(Definition({.name = "y", .window = absl::Seconds(200)})).ok());
  ASSERT_TRUE(store_->Create(Definition({.name = "z", .metric = "other"})).ok());
  Written(*store_, {Record(Begun{.id = "r", .at = 0, .experiments = {"x", "y", "z"}}),
                    Record(Seen{.client = "r", .at = 150}),
                    Record(Seen{.client = "r", .at = 50, .metric = "other"})});
  EXPECT_THAT(Picture(*store_, "x"), ElementsAre("r:"));
  EXPECT_THAT(Picture(*store_, "y"), ElementsAre("r: good/=1"));
  EXPECT_THAT(Picture(*store_, "z"), ElementsAre("r: other/=1"));
}

TEST_P(ExperimentStoreTest, SaysWhereAnOutcomeCounts) {
  ASSERT_TRUE(store_->Create(Definition({.name = "y", .window = absl::Seconds(200)})).ok());
  ASSERT_TRUE(store_->Create(Definition({.name = "z", .metric = "other"})).ok());
  const auto began = [](const std::string& id, double at, bool forced) {
    v1::ExperimentRecord record = Record(Begun{.id = id, .at = at, .experiments = {"x", "y", "z"}});
    for (auto& part : *record.mutable_began()->mutable_parts()) part.set_forced(forced);
    return record;
  };
  const auto counted = [this](const Records& records, Source source = Source::kNow) {
    const absl::StatusOr<WriteResult> result = store_->Write(records, source);
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<std::string> places;
    for (const CountedOutcome& outcome : result->outcomes) {
      places.push_back(absl::StrCat(outcome.experiment, "/", outcome.arm, " ", outcome.metric, "=",
                                    outcome.value));
    }
    return places;
  };
  const v1::ExperimentRecord late = Record(Seen{.client = "r", .at = 150, .value = 0.5});
  EXPECT_THAT(counted({began("r", 0, false), began("f", 0, true), late,
                       Record(Seen{.client = "r", .at = 50, .metric = "other"}),
                       Record(Seen{.client = "f", .at = 50}),
                       Record(Seen{.client = "r", .at = 50, .metric = "unheard"})}),
              ElementsAre("y/a good=0.5", "z/a other=1"));
  EXPECT_THAT(counted({late}), IsEmpty()) << "once";
  EXPECT_THAT(counted({Record(Seen{.client = "w", .at = 9})}, Source::kSpool), IsEmpty());
  EXPECT_THAT(counted({began("w", 8, false)}, Source::kSpool),
              ElementsAre("x/a good=1", "y/a good=1"));
}

TEST_P(ExperimentStoreTest, AReaderMayStopAndMayCallTheStore) {
  Written(*store_, {Record(Begun{.id = "1", .at = 1}), Record(Begun{.id = "2", .at = 2})});
  int rows = 0;
  auto stop = [&](const RequestRow& row) -> absl::Status {
    ++rows;
    Written(*store_, {Record(Seen{.client = row.id, .at = 3})});
    return absl::CancelledError("enough");
  };
  EXPECT_EQ(store_->ReadRequests({.experiment = "x"}, stop), absl::CancelledError("enough"));
  EXPECT_EQ(rows, 1);
  EXPECT_TRUE(absl::IsNotFound(store_->ReadRequests({.experiment = "no"}, stop)));
}

// Retention.

TEST_P(ExperimentStoreTest, ForgetsStoppedExperimentsWhole) {
  v1::Experiment old = Definition({.name = "old"});
  old.set_state(v1::Experiment::STATE_STOPPED);
  *old.mutable_stop_time() = Second(1000);
  ASSERT_TRUE(store_->Create(old).ok());
  Records records;
  for (int i = 0; i < 2500; ++i) {
    records.push_back(Record(Begun{.id = absl::StrCat("old", i), .experiments = {"old"}}));
  }
  records.push_back(Paired("old0", 1, 1, 1));
  records.push_back(Record(Begun{.id = "both", .at = 5, .experiments = {"old", "x"}}));
  records.push_back(Record(Seen{.client = "both", .at = 6}));
  records.push_back(Record(Begun{.id = "x", .at = 7}));
  Written(*store_, records);
  Written(*store_, {Record(Seen{.client = "nobody", .at = 6})}, Source::kSpool);
  EXPECT_EQ(*store_->Forget(TimeOf(Second(1))), 0) << "its outcomes could still come";
  EXPECT_THAT(RowsOf(*store_, {.experiment = "old"}), SizeIs(2501));
  int64_t forgotten = 0, calls = 0;
  for (int64_t more = 1; more > 0; forgotten += more, ++calls) {
    more = *store_->Forget(TimeOf(Second(1100.5)));
  }
  EXPECT_EQ(forgotten, 2501 + 1);
  EXPECT_THAT(calls, Ge(3));
  EXPECT_THAT(RowsOf(*store_, {.experiment = "old"}), IsEmpty());
  EXPECT_THAT(Picture(*store_), ElementsAre("both: good/=1", "x:"));
  EXPECT_EQ(IntOf(place_->Execute("SELECT count(*) FROM requests")[0][0]), 2);
  EXPECT_THAT(place_->Execute("SELECT 1 FROM waiting_outcomes"), IsEmpty());
  EXPECT_THAT(place_->Execute("SELECT 1 FROM pairs"), IsEmpty());
}

// The schema.

TEST_P(ExperimentStoreTest, ReplicasMayMakeTheSchemaAtOnce) {
  const std::unique_ptr<StorePlace> place = GetParam().make();
  std::vector<std::thread> replicas;
  for (int i = 0; i < 6; ++i) {
    replicas.emplace_back([&place, i] {
      const std::unique_ptr<Store> store = place->Open();
      const absl::Status status =
          store->Create(Definition({.name = absl::StrCat("e", i)})).status();
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& replica : replicas) replica.join();
  EXPECT_THAT(ExperimentsOf(*place->Open()), SizeIs(6));
}

TEST_P(ExperimentStoreTest, MigrationsGoOnFromWhereAStoreIs) {
  Written(*store_, {Record(Begun{.id = "r"})});
  std::vector<Migration> longer(Migrations().begin(), Migrations().end());
  longer.push_back({.statements = {"ALTER TABLE requests ADD COLUMN colour TEXT",
                                   "UPDATE requests SET colour = 'red'"}});
  longer.push_back({.statements = {"UPDATE requests SET colour = colour || 'der'"}});
  for (int again = 0; again < 2; ++again) {
    const absl::StatusOr<std::unique_ptr<SqlSession>> session = place_->Connect();
    const absl::Status status = Migrate(**session, longer);
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(TextOf(place_->Execute("SELECT colour FROM requests")[0][0]), "redder");
}

TEST_P(ExperimentStoreTest, AStoreFromBeforeReplaysTakesThem) {
  Written(*store_, {Record(Begun{.id = "r", .at = 1})});
  store_.reset();
  DropPairs();
  place_->Execute("DROP TABLE shadows");
  place_->Execute("ALTER TABLE participations DROP COLUMN subgroup");
  place_->Execute("UPDATE schema_version SET version = 1");
  store_ = place_->Open();
  EXPECT_THAT(Written(*store_, {Compared("r", 2)}), ElementsAre(Recorded::kWritten));
  EXPECT_TRUE(RowsOf(*store_).at(0).shadow.has_value());
}

TEST_P(ExperimentStoreTest, RequestsFromBeforeSubgroupsHaveNone) {
  Written(*store_, {Record(Begun{.id = "r", .at = 1})});
  store_.reset();
  DropPairs();
  place_->Execute("ALTER TABLE participations DROP COLUMN subgroup");
  place_->Execute("UPDATE schema_version SET version = 2");
  store_ = place_->Open();
  EXPECT_EQ(RowsOf(*store_).at(0).subgroup, "");
}

TEST_P(ExperimentStoreTest, AStoreFromBeforePairsTakesThem) {
  Written(*store_, {Record(Begun{.id = "r", .at = 1})});
  store_.reset();
  DropPairs();
  place_->Execute("UPDATE schema_version SET version = 3");
  store_ = place_->Open();
  EXPECT_EQ(RowsOf(*store_).at(0).pair_arm, "");
  EXPECT_THAT(Written(*store_, {Paired("r", 2, 1, 1)}), ElementsAre(Recorded::kWritten));
  EXPECT_TRUE(RowsOf(*store_).at(0).pair.has_value());
}

TEST_P(ExperimentStoreTest, AMigrationThatFailsLeavesTheVersionBefore) {
  std::vector<Migration> longer(Migrations().begin(), Migrations().end());
  longer.push_back({.statements = {"CREATE TABLE extra (a BIGINT)", "NONSENSE"}});
  {
    const absl::StatusOr<std::unique_ptr<SqlSession>> session = place_->Connect();
    EXPECT_FALSE(Migrate(**session, longer).ok());
  }
  EXPECT_THAT(place_->Execute("SELECT version FROM schema_version"), SizeIs(1));
  EXPECT_EQ(IntOf(place_->Execute("SELECT version FROM schema_version")[0][0]),
            Migrations().size());
  EXPECT_NE(place_->Open(), nullptr);
}

TEST_P(ExperimentStoreTest, ANewerStoreIsRefused) {
  place_->Execute("UPDATE schema_version SET version = 99");
  const absl::Status status = OpenStore(place_->where()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("99"), HasSubstr("newer epikvd")));
}

TEST_P(ExperimentStoreTest, OtherProgramsDatabasesAreLeftAlone) {
  for (const char* table : {"CREATE TABLE customers (a BIGINT)",
                            "CREATE TABLE schema_version (installed_rank BIGINT)"}) {
    const std::unique_ptr<StorePlace> place = GetParam().make();
    place->Execute(table);
    const absl::Status status = OpenStore(place->where()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("not an experiment store"));
    EXPECT_THAT(*(*place->Connect())->Tables(), SizeIs(1));
  }
}

// Outages.

TEST_P(ExperimentStoreTest, AnOutageIsUnavailableAndEnds) {
  store_ = place_->Open(kShort);
  Written(*store_, {Record(Begun{.id = "1"})});
  for (int round = 0; round < 2; ++round) {
    place_->GoAway();
    const absl::Duration begin = SteadyTime();
    const Records records = {Record(Begun{.id = absl::StrCat("r", round)})};
    EXPECT_TRUE(absl::IsUnavailable(store_->Write(records, Source::kNow).status()));
    EXPECT_TRUE(absl::IsUnavailable(store_->Create(Definition({.name = "n"})).status()));
    EXPECT_THAT(SteadyTime() - begin, Lt(kLittle));
    place_->ComeBack();
    const absl::StatusOr<WriteResult> written =
        AwaitAvailable([&] { return store_->Write(records, Source::kNow); });
    EXPECT_TRUE(written.ok()) << written.status();
    EXPECT_THAT(RowsOf(*place_->Open()), SizeIs(round + 2));
  }
}

TEST(PostgresStoreTest, AStoreMayBeOpenedInAnOutage) {
  PostgresPlace place(SharedPostgres());
  place.GoAway();
  const std::unique_ptr<Store> store = place.Open(kShort);
  EXPECT_TRUE(absl::IsUnavailable(store->Revision().status()));
  place.ComeBack();
  EXPECT_TRUE(AwaitAvailable([&] { return store->Create(Definition({.name = "x"})); }).ok());
}

TEST(PostgresStoreTest, AServerThatHangsIsGivenUp) {
  PostgresPlace place(SharedPostgres());
  const std::unique_ptr<Store> store = place.Open(kShort);
  ASSERT_TRUE(AwaitAvailable([&] { return store->Revision(); }).ok());
  const std::string backend = SharedPostgres().Execute(
      "postgres",
      absl::StrCat("SELECT pid FROM pg_stat_activity WHERE datname = '", place.database(), "'"));
  const pid_t pid = std::stoi(backend);
  kill(pid, SIGSTOP);
  const absl::Duration begin = SteadyTime();
  EXPECT_TRUE(absl::IsUnavailable(store->Revision().status()));
  EXPECT_THAT(SteadyTime() - begin, Lt(kLittle));
  EXPECT_TRUE(AwaitAvailable([&] { return store->Revision(); }).ok()) << "by another connection";
  kill(pid, SIGCONT);
}

// A transaction of a replica that vanished holds the write lock no longer than a statement may
// take.
TEST(PostgresStoreTest, AWriterThatSaysNothingMoreLosesTheLock) {
  PostgresPlace place(SharedPostgres());
  const std::unique_ptr<Store> store = place.Open();
  const absl::StatusOr<std::unique_ptr<SqlSession>> vanished =
      OpenPostgres(*PostgresAddress::Parse(place.where()), kShort);
  ASSERT_TRUE((*vanished)->Begin().ok());
  EXPECT_TRUE(store->Create(Definition({.name = "x"})).ok());
}

TEST(PostgresStoreTest, WhatTheServerRefusesForNowIsAnOutage) {
  PostgresPlace place(SharedPostgres());
  const std::unique_ptr<Store> store = place.Open();
  place.Execute(
      "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no "
      "space' USING ERRCODE = (SELECT description FROM pg_shdescription WHERE false UNION ALL "
      "SELECT current_setting('epikv.state')); END $$");
  place.Execute("CREATE TRIGGER fail BEFORE INSERT ON experiments EXECUTE FUNCTION fail()");
  for (const auto& [state, code] : std::map<std::string, absl::StatusCode>{
           {"53100", absl::StatusCode::kUnavailable},      // disk full
           {"53300", absl::StatusCode::kUnavailable},      // too many connections
           {"25006", absl::StatusCode::kUnavailable},      // read-only
           {"40P01", absl::StatusCode::kUnavailable},      // deadlock
           {"57P03", absl::StatusCode::kUnavailable},      // in recovery
           {"58030", absl::StatusCode::kUnavailable},      // I/O
           {"23514", absl::StatusCode::kInvalidArgument},  // constraint
           {"42501", absl::StatusCode::kPermissionDenied},
           {"XX001", absl::StatusCode::kDataLoss},
           {"0A000", absl::StatusCode::kInternal}}) {
    SharedPostgres().Execute("postgres", absl::StrCat("ALTER DATABASE ", place.database(),
                                                      " SET epikv.state = '", state, "'"));
    const absl::Status status = place.Open()->Create(Definition({.name = "x"})).status();
    EXPECT_EQ(status.code(), code) << state << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no space"));
  }
}

TEST(PostgresStoreTest, NoMessageHoldsAPassword) {
  PostgresPlace place(SharedPostgres());
  SharedPostgres().Execute("postgres", "DROP ROLE IF EXISTS locked");
  SharedPostgres().Execute("postgres", "CREATE ROLE locked LOGIN PASSWORD 'opensesame'");
  const std::string host = place.where().substr(place.where().find("?host="));
  const std::map<std::string, absl::StatusCode> wrong = {
      {absl::StrCat("postgresql://locked:hunter2@/", place.database(), host),
       absl::StatusCode::kUnauthenticated},
      {absl::StrCat("postgresql://locked:opensesame@/nosuch", host),
       absl::StatusCode::kFailedPrecondition},
      {absl::StrCat("postgresql://locked:opensesame@/", place.database(), host),
       absl::StatusCode::kPermissionDenied},  // to make tables in a schema of another
      {absl::StrCat("postgresql://locked:hunter2@/", place.database(), host, "&nonsense=hunter2"),
       absl::StatusCode::kInvalidArgument},
      {"postgresql://locked:hunter2@[::1", absl::StatusCode::kInvalidArgument}};
  for (const auto& [url, code] : wrong) {
    const absl::Status status = OpenStore(url).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(status.ToString(), AllOf(Not(HasSubstr("hunter2")), Not(HasSubstr("opensesame"))));
  }
  const auto away = OpenStore("postgresql://locked:hunter2@127.0.0.1:1/d");
  ASSERT_TRUE(away.ok()) << away.status();
  EXPECT_THAT((*away)->Revision().status().ToString(),
              AllOf(HasSubstr("postgresql://127.0.0.1:1/d"), Not(HasSubstr("hunter2"))));
}

TEST(SqliteStoreTest, IsForItsOwnerAloneAndSynced) {
  SqlitePlace place;
  const std::unique_ptr<Store> store = place.Open();
  ASSERT_TRUE(store->Create(Definition({.name = "x"})).ok());
  for (const char* suffix : {"", "-wal", "-shm"}) {
    struct stat facts = {};
    ASSERT_EQ(stat((place.where() + suffix).c_str(), &facts), 0) << suffix;
    EXPECT_EQ(facts.st_mode & 0777, 0600u) << suffix;
  }
  EXPECT_EQ(TextOf(place.Execute("PRAGMA journal_mode")[0][0]), "wal");
  EXPECT_EQ(IntOf(place.Execute("PRAGMA synchronous")[0][0]), 2) << "FULL";
  EXPECT_EQ(IntOf(place.Execute("PRAGMA foreign_keys")[0][0]), 1);
}

TEST(SqliteStoreTest, SaysWhatIsWrongWithAPath) {
  TemporaryFolder folder;
  const std::string text = folder.Write("text", std::string(5000, 'x'));
  for (const std::string& path : {folder.File("no/such/folder"), folder.File(""), text}) {
    const absl::Status status = OpenStore(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
  EXPECT_EQ(folder.Read("text"), std::string(5000, 'x'));
  EXPECT_TRUE(absl::IsInvalidArgument(OpenStore("").status()));
}

// Nor to a new one in its place, which nobody would look into once it is back.
TEST(SqliteStoreTest, NothingIsCommittedToAFileThatWasMovedAway) {
  SqlitePlace place;
  const std::unique_ptr<Store> store = place.Open();
  ASSERT_TRUE(store->Create(Definition({.name = "x"})).ok());
  const std::string away = place.where() + ".away";
  for (const char* suffix : {"", "-wal", "-shm"}) {
    std::filesystem::rename(place.where() + suffix, away + suffix);
  }
  const absl::Status status = store->Create(Definition({.name = "y"})).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_FALSE(std::filesystem::exists(place.where()));
  for (const char* suffix : {"", "-wal", "-shm"}) {
    std::error_code not_there;  // a log, once it is written back
    std::filesystem::rename(away + suffix, place.where() + suffix, not_there);
  }
  ASSERT_TRUE(store->Create(Definition({.name = "y"})).ok());
  EXPECT_THAT(ExperimentsOf(*place.Open()), SizeIs(2));
}

TEST(SqliteStoreTest, AFullDiskIsAnOutage) {
  SqlitePlace place;
  const std::unique_ptr<Store> store = place.Open();
  ASSERT_TRUE(store->Create(Definition({.name = "x"})).ok());
  signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit full = {.rlim_cur = 200'000, .rlim_max = before.rlim_max};
  Records records;
  for (int i = 0; i < 3000; ++i) records.push_back(Record(Begun{.id = absl::StrCat("r", i)}));
  setrlimit(RLIMIT_FSIZE, &full);
  const absl::Status status = store->Write(records, Source::kNow).status();
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(RowsOf(*store), IsEmpty());
  EXPECT_THAT(Written(*store, records), SizeIs(3000));
  EXPECT_THAT(RowsOf(*store), SizeIs(3000));
}

}  // namespace experiment_store_test
}  // namespace epikv
