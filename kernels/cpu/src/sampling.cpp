// One token a row from softmax(logits / temperature), after top-k, top-p and min-p, by inverse CDF in id order:
//     the first kept token whose cumulative weight exceeds uniform * total,  weight = e^(x - max x).
// Rows share nothing, so a row's token cannot depend on its company. No full sort: the few likeliest are selected, and
// more of them only where top-p asks for more.
#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace pagedray {

constexpr float GREEDY_TEMPERATURE = 1e-5f;
constexpr int64_t SPAN = 1024;  // tokens whose weights are summed before the running total is looked at

struct Candidate {
    float x;
    int32_t id;
    bool operator<(const Candidate& other) const { return x != other.x ? x > other.x : id < other.id; }
};

struct Row {
    std::vector<float> x, weight;
    std::vector<Candidate> likeliest;
    int64_t size;

    Row(int64_t vocab) : x(vocab), weight(vocab), size(vocab) {}

    // The k likeliest, of equals the lowest ids, in that order: one pass with a buffer that is halved when full.
    void select(int64_t k) {
        const size_t full = std::min<size_t>(2 * k + 256, size);
        likeliest.clear();
        Candidate bound{-INFINITY, INT32_MAX};
        const auto halve = [&] {
            std::nth_element(likeliest.begin(), likeliest.begin() + k - 1, likeliest.end());
            likeliest.resize(k);
            bound = likeliest[k - 1];
        };
        for (int32_t i = 0; i < size; i++) {
            const Candidate c{x[i], i};
            if (!(c < bound)) continue;
            likeliest.push_back(c);
            if (likeliest.size() > full) halve();
        }
        if (static_cast<int64_t>(likeliest.size()) > k) halve();
        std::sort(likeliest.begin(), likeliest.end());
    }

    double total() const {
        double sum = 0;
        for (int64_t i = 0; i < size; i += SPAN) sum += span_total(i);
        return sum;
    }

    double span_total(int64_t begin) const {
        const int64_t end = std::min(begin + SPAN, size), whole = begin + (end - begin) / W * W;
        double sums[W] = {}, sum = 0;  // in double, as the draw adds them
        for (int64_t i = begin; i < whole; i += W)
            for (int j = 0; j < W; j++) sums[j] += weight[i + j];
        for (double s : sums) sum += s;
        for (int64_t i = whole; i < end; i++) sum += weight[i];
        return sum;
    }

    double total_of_likeliest() const {
        double sum = 0;
        for (const Candidate& c : likeliest) sum += weight[c.id];
        return sum;
    }

    // Keeps the fewest that reach p of `total`, at least one; false where all of them do not.
    bool keep_top_p(double p, double total) {
        size_t kept = 0;
        double reached = 0;
        do reached += weight[likeliest[kept++].id];
        while (reached < p * total && kept < likeliest.size());
        likeliest.resize(kept);
        return reached >= p * total;
    }

    // The likeliest weighs 1, so a weight is its likelihood relative to that.
    void drop_below(float min_p) {
        if (min_p <= 0) return;
        for (float& w : weight) w = w >= min_p ? w : 0;
    }

    int64_t draw_from_likeliest(double uniform) {
        std::sort(likeliest.begin(), likeliest.end(), [](auto& a, auto& b) { return a.id < b.id; });
        const double sum = total_of_likeliest();
        double cumulative = 0;
        int64_t last = 0;
        for (const Candidate& c : likeliest) {
            if (weight[c.id] > 0) last = c.id;
            if ((cumulative += weight[c.id]) > uniform * sum) break;
        }
        return last;
    }

    int64_t draw_from_all(double uniform) const {
        const double target = uniform * total();
        double cumulative = 0;
        int64_t last = 0;
        for (int64_t begin = 0; begin < size; begin += SPAN) {
            const double after = cumulative + span_total(begin);
            if (after > target) {
                for (int64_t i = begin; i < std::min(begin + SPAN, size); i++) {
                    if (weight[i] > 0) last = i;
                    if ((cumulative += weight[i]) > target) return i;
                }
                return last;  // the span's sum was rounded up
            }
            cumulative = after;
        }
        return last;
    }
};

static int64_t sample_row(Row& row, const float* logits, float temperature, int64_t top_k, float top_p, float min_p,
                          double uniform) {
    const int64_t size = row.size, best = std::max_element(logits, logits + size) - logits;
    if (temperature < GREEDY_TEMPERATURE || !std::isfinite(logits[best])) return best;
    const float highest = logits[best] / temperature;
    for_each_vector(size, [&](int64_t i, auto get, auto put) {
        const vfloat x = get(logits + i) / temperature;
        put(&row.x[i], x);
        put(&row.weight[i], exp(x - highest));
    });
    const bool by_k = top_k > 0 && top_k < size, by_p = top_p < 1;
    if (!by_k && !by_p) {
        row.drop_below(min_p);
        return row.draw_from_all(uniform);
    }
    const double total = by_k ? 0 : row.total();
    for (int64_t k = by_k ? top_k : std::min<int64_t>(512, size);; k = std::min(8 * k, size)) {
        row.select(k);
        const bool enough = !by_p || row.keep_top_p(top_p, by_k ? row.total_of_likeliest() : total);
        if (enough || by_k || k == size) break;
    }
    row.drop_below(min_p);
    return row.draw_from_likeliest(uniform);
}

}  // namespace pagedray

using namespace pagedray;

// Minus infinity in rows[i] of the logits for every token whose bit in allowed[i] is not set; 32 to a word.
PAGEDRAY_API void pagedray_mask_tokens(float* logits, const int64_t* rows, const int32_t* allowed, int64_t count,
                                       int64_t vocab, int64_t row_stride, int64_t words, int32_t threads) {
    parallel_for(count, 1, threads, [&](int64_t i) {
        float* row = logits + rows[i] * row_stride;
        for (int64_t first = 0; first < vocab; first += 32) {
            const uint32_t bits = first / 32 < words ? static_cast<uint32_t>(allowed[i * words + first / 32]) : 0;
            if (bits == 0xFFFFFFFF) continue;  // inside a string most words are so
            const int64_t end = std::min<int64_t>(32, vocab - first);
            for (int64_t j = 0; j < end; j++) row[first + j] = bits >> j & 1 ? row[first + j] : -INFINITY;
        }
    });
}

// The likeliest token of each row, of equals the lowest id.
PAGEDRAY_API void pagedray_greedy(int64_t* out, const float* logits, int64_t rows, int64_t vocab, int64_t row_stride,
                                  int32_t threads) {
    parallel_for(rows, 1, threads, [&](int64_t r) {
        const float* row = logits + r * row_stride;
        vfloat highest = splat(-INFINITY);
        int64_t i = 0;
        for (; i + W <= vocab; i += W) highest = max(load(row + i), highest);
        float top = max(highest);
        for (; i < vocab; i++) top = std::max(top, row[i]);
        out[r] = 0;
        for (int64_t j = 0; j < vocab; j++)
            if (row[j] == top) {
                out[r] = j;
                break;
            }
    });
}

PAGEDRAY_API void pagedray_sample(int64_t* out, const float* logits, int64_t rows, int64_t vocab, int64_t row_stride,
                                  const float* temperature, const int64_t* top_k, const float* top_p,
                                  const float* min_p, const double* uniform, int32_t threads) {
    parallel(rows, threads, [&](Tasks& mine) {
        Row row(vocab);
        for (int64_t r; mine.next(r);)
            out[r] = sample_row(row, logits + r * row_stride, temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]);
    });
}
