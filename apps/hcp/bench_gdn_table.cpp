// The numbers of `hcp bench gdn` as JSON and as a table.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "hcp/bench_gdn.h"
#include "hcp/bench_measure.h"

namespace hybridcp::cli {

namespace {

using Json = nlohmann::json;

constexpr std::array kPasses{"forward", "backward", "forward+backward", "summary",
                             "gradient_summary"};

/// The pass's microseconds in one sample; NaN where it was not timed.
double pass_us(const LaneTimes& times, const std::string& pass) {
    const auto of = [&](const char* name) {
        const auto found = times.us.find(name);
        return found == times.us.end() ? std::nan("") : found->second;
    };
    return pass == "forward+backward" ? of("forward") + of("backward") : of(pass.c_str());
}

std::vector<double> pass_samples(const Lane& lane, const std::string& pass) {
    std::vector<double> us;
    for (const LaneTimes& times : lane.samples) {
        us.push_back(pass_us(times, pass));
    }
    return us;
}

double pass_flops(const std::map<std::string, double>& flops, const std::string& pass) {
    if (pass == "forward+backward") {
        return flops.at("forward") + flops.at("backward");
    }
    const auto found = flops.find(pass);
    return found == flops.end() ? std::nan("") : found->second;
}

bool wanted(const BenchGdnOptions& options, const std::string& pass) {
    const auto asked = [&](const std::string& name) {
        return std::find(options.passes.begin(), options.passes.end(), name) !=
               options.passes.end();
    };
    return pass == "forward+backward" ? asked("forward") && asked("backward") : asked(pass);
}

Json pass_summary(const BenchGdnOptions& options,
                  const Lane& lane,
                  const std::string& pass,
                  double count,
                  double peak) {
    const std::vector<double> us = pass_samples(lane, pass);
    const double us_each = median(us) / count;
    Json entry{{"us", us_each}, {"us_min", smallest(us) / count}};
    const double flops = pass_flops(gdn_flops(options, kCountedChunk, true), pass);
    if (std::isfinite(flops)) {
        const double dense_64 = pass_flops(gdn_flops(options, 64, false), pass);
        entry["gflops"] = flops / us_each * 1e-3;
        entry["of_peak"] = flops / (us_each * 1e-6) / (peak * options.threads);
        entry["gflops_dense_64"] = dense_64 / us_each * 1e-3;
    } else {
        entry["of_forward_backward"] = median(us) / median(pass_samples(lane, "forward+backward"));
    }
    double bytes = -1.0;
    for (const LaneTimes& times : lane.samples) {
        const auto found = times.bytes.find(pass);
        bytes = found == times.bytes.end() ? bytes : std::max(bytes, found->second);
    }
    if (bytes >= 0.0) {
        entry["peak_megabytes"] = bytes / 1e6;
    }
    return entry;
}

const Json* find_pass(const Json& lanes, const std::string& name, const std::string& pass) {
    for (const Json& lane : lanes) {
        if (lane.at("name") == name && lane.at("passes").contains(pass)) {
            return &lane.at("passes").at(pass);
        }
    }
    return nullptr;
}

std::string cell(const Json& entry, const char* key, double factor, int digits, const char* unit) {
    return entry.contains(key)
               ? fmt::format("{:.{}f}{}", factor * entry.at(key).get<double>(), digits, unit)
               : std::string("-");
}

/// How many times as long the lane `name` takes.
std::string ratio(const Json& lanes, const std::string& name, const char* pass, const Json& entry) {
    const Json* other = find_pass(lanes, name, pass);
    return other == nullptr || other == &entry || !entry.contains("gflops")
               ? std::string("-")
               : fmt::format("{:.2f}x",
                             other->at("us").get<double>() / entry.at("us").get<double>());
}

std::string run_rows(const Json& run) {
    std::string text;
    const Json& lanes = run.at("lanes");
    for (const char* pass : kPasses) {
        for (const Json& lane : lanes) {
            if (!lane.at("passes").contains(pass)) {
                continue;
            }
            const Json& entry = lane.at("passes").at(pass);
            text += fmt::format(
                "{:>7} {:<5} {:<17} {:<20} {:>9} {:>9} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9}\n",
                run.at("tokens").get<std::int64_t>(), run.at("dtype").get<std::string>(), pass,
                lane.at("name").get<std::string>(), cell(entry, "us", 1, 3, ""),
                cell(entry, "us_min", 1, 3, ""), cell(entry, "gflops", 1, 2, ""),
                cell(entry, "of_peak", 100, 1, " %"),
                cell(entry, "of_forward_backward", 100, 1, " %"),
                cell(entry, "peak_megabytes", 1, 1, ""), ratio(lanes, "eager", pass, entry),
                ratio(lanes, "hf", pass, entry));
        }
    }
    return text;
}

/// One line for each lane and dtype: the time per token at the most tokens over that at the fewest.
std::string flatness_rows(const Json& flatness) {
    std::string text;
    for (const Json& entry : flatness) {
        text += fmt::format(
            "{} {} {}: us per token at {} over {} tokens {:.2f}, largest over smallest {:.2f}\n",
            entry.at("dtype").get<std::string>(), entry.at("name").get<std::string>(),
            entry.at("pass").get<std::string>(), entry.at("most_tokens").get<std::int64_t>(),
            entry.at("fewest_tokens").get<std::int64_t>(),
            entry.at("most_over_fewest").get<double>(),
            entry.at("largest_over_smallest").get<double>());
    }
    return text;
}

}  // namespace

Json gdn_run_summary(const BenchGdnOptions& options,
                     const std::vector<Lane>& lanes,
                     const std::map<Isa, double>& peaks,
                     std::int64_t tokens) {
    Json result{{"tokens", tokens}, {"lanes", Json::array()}, {"peak_gflops", Json::object()}};
    for (const auto& [isa, flops] : peaks) {
        result["peak_gflops"][isa_name(isa)] = flops * 1e-9;
    }
    const auto count = static_cast<double>(tokens * options.value_heads);
    for (const Lane& lane : lanes) {
        Json passes = Json::object();
        for (const char* pass : kPasses) {
            if (wanted(options, pass) && std::isfinite(pass_us(lane.samples.at(0), pass))) {
                passes[pass] = pass_summary(options, lane, pass, count, peaks.at(lane.isa));
            }
        }
        result["lanes"].push_back({{"name", lane.name}, {"passes", passes}});
    }
    return result;
}

Json gdn_flatness(const Json& runs) {
    Json rows = Json::array();
    for (const Json& first : runs) {
        for (const Json& lane : first.at("lanes")) {
            for (const auto& [pass, entry] : lane.at("passes").items()) {
                Json row{{"dtype", first.at("dtype")}, {"name", lane.at("name")}, {"pass", pass}};
                std::map<std::int64_t, double> us;
                for (const Json& run : runs) {
                    const Json* other = run.at("dtype") == first.at("dtype")
                                            ? find_pass(run.at("lanes"), lane.at("name"), pass)
                                            : nullptr;
                    if (other != nullptr) {
                        us[run.at("tokens").get<std::int64_t>()] = other->at("us").get<double>();
                    }
                }
                const bool said = us.begin()->first != first.at("tokens").get<std::int64_t>();
                if (said || us.size() < 2 || !entry.contains("gflops")) {
                    continue;
                }
                const auto [low, high] = std::minmax_element(
                    us.begin(), us.end(),
                    [](const auto& a, const auto& b) { return a.second < b.second; });
                row["fewest_tokens"] = us.begin()->first;
                row["most_tokens"] = us.rbegin()->first;
                row["most_over_fewest"] = us.rbegin()->second / us.begin()->second;
                row["largest_over_smallest"] = high->second / low->second;
                rows.push_back(std::move(row));
            }
        }
    }
    return rows;
}

std::string bench_gdn_table(const Json& results) {
    std::string text = fmt::format(
        "{}, {} thread(s), {} time; {} key and {} value heads, K = {}, V = {}, gates {}\n",
        results.at("cpu").get<std::string>(), results.at("threads").get<int>(),
        results.at("threads") == 1 ? "CPU" : "elapsed", results.at("key_heads").get<int>(),
        results.at("value_heads").get<int>(), results.at("key_dim").get<int>(),
        results.at("value_dim").get<int>(), results.at("gates").get<std::string>());
    text +=
        fmt::format("{:>7} {:<5} {:<17} {:<20} {:>9} {:>9} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9}\n",
                    "tokens", "dtype", "pass", "variant", "us/tok/hd", "min", "GFLOP/s", "of peak",
                    "of f+b", "peak MB", "vs eager", "vs hf");
    for (const Json& run : results.at("runs")) {
        text += run_rows(run);
        text += fmt::format("{:>7} {:<5} measured peak of a core, GFLOP/s:", "",
                            run.at("dtype").get<std::string>());
        for (const auto& [isa, gflops] : run.at("peak_gflops").items()) {
            text += fmt::format(" {} {:.1f}", isa, gflops.get<double>());
        }
        text += "\n";
    }
    return text + flatness_rows(results.at("flatness"));
}

}  // namespace hybridcp::cli
