#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "epikv/v1/experiment.pb.h"
#include "server/experiments/definition/subgroups.h"
#include "server/experiments/figures/arms.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/figure_messages.h"
#include "server/experiments/figures/measures.h"
#include "server/experiments/figures/metric_part.h"
#include "server/experiments/store/store.h"

namespace epikv {

// The primary metric by subgroups, of everyone. Where there are none it does nothing.
class SubgroupPart {
 public:
  // All that is given outlives this.
  SubgroupPart(const v1::Experiment& experiment, const Arms& arms, const Subgroups& subgroups,
               const Measure& measure, const EarlierMeans* earlier)
      : experiment_(experiment), arms_(arms), measure_(measure), earlier_(earlier) {
    if (subgroups.divisions().empty()) return;
    alphas_ = AlphaPerSubgroup(experiment.alpha(),
                               {.arms = experiment.arms_size(),
                                .divisions = static_cast<int>(subgroups.divisions().size()),
                                .classes = static_cast<int>(subgroups.num_classes())});
    for (const Division& division : subgroups.divisions()) {
      std::vector<std::unique_ptr<Population>>& classes = populations_.emplace_back();
      for (size_t i = 0; i < division.names.size(); ++i) {
        classes.push_back(std::make_unique<Population>(arms, measure, alphas_.interval));
      }
    }
  }

  void Add(const Owner& owner, const RequestRow& row) {
    if (populations_.empty()) return;
    const Observations values = ObservationsOf(measure_, row);
    const std::optional<double> covariate = CovariateOf(measure_.metric, owner, earlier_);
    for (size_t i = 0; i < populations_.size(); ++i) {
      populations_[i][owner.classes[i]]->Add(owner, values, covariate);
    }
  }

  // Into what Parties have begun. everyone: the metric in all units.
  void Report(const Population& everyone, v1::ExperimentReport& report) const {
    for (size_t i = 0; i < populations_.size(); ++i) {
      ReportDivision(i, everyone, !report.blocked().empty(),
                     *report.mutable_subgroups(static_cast<int>(i)));
    }
  }

 private:
  void ReportDivision(size_t division, const Population& everyone, bool blocked,
                      v1::SubgroupAnalysis& report) const {
    report.set_alpha(experiment_.alpha());
    report.set_heterogeneity_alpha(experiment_.alpha());
    std::vector<const Population*> sound;
    for (size_t i = 0; i < populations_[division].size(); ++i) {
      const Population& population = *populations_[division][i];
      v1::Subgroup& subgroup = *report.mutable_subgroups(static_cast<int>(i));
      const bool uneven =
          subgroup.sample_ratio().alarm() && experiment_.sample_ratio_explanation().empty();
      *subgroup.mutable_analysis() = population.Analyse(blocked || uneven);
      if (!uneven) sound.push_back(&population);
    }
    for (size_t arm = 0; arm < arms_.size() && !blocked; ++arm) {
      if (arm != arms_.control()) *report.add_heterogeneity() = Compared(arm, sound, everyone);
    }
  }
  v1::Heterogeneity Compared(size_t arm, const std::vector<const Population*>& subgroups,
                             const Population& everyone) const {
    std::vector<Comparison> comparisons;
    for (const Population* subgroup : subgroups) comparisons.push_back(subgroup->Compared(arm));
    const Heterogeneity found = CompareSubgroups(comparisons, everyone.Compared(arm).tau_squared);
    v1::Heterogeneity heterogeneity;
    heterogeneity.set_arm(arms_.at(arm).name());
    heterogeneity.set_p_value(found.p_value);
    heterogeneity.set_verdict(VerdictOf(found, alphas_.heterogeneity));
    return heterogeneity;
  }

  const v1::Experiment& experiment_;
  const Arms& arms_;
  const Measure& measure_;
  const EarlierMeans* const earlier_;
  SubgroupAlphas alphas_;
  std::vector<std::vector<std::unique_ptr<Population>>> populations_;  // by division and class
};

}  // namespace epikv
