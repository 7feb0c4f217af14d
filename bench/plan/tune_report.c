/* SPDX-License-Identifier: Apache-2.0 */
/* tune_report.c: prints the candidates of zero-bench tune, why they were not chosen, the choice, and the
 * lines that configure it. */
#include "bench/plan/tune.h"
#include "bench/report/report.h"

#include <string.h>

struct tune_name tune_kind_name(const struct candidate *c)
{
    struct tune_name name;
    char stage[40], states[STATES_TEXT];
    if (c->hybrid)
        snprintf(stage, sizeof stage, "%s in groups of %d", c->hybrid == HYBRID_HSDP ? "HSDP" : "HFSDP",
                 c->dp_shard);
    else
        snprintf(stage, sizeof stage, "stage %d", c->stage);
    states_text(&c->states, states);
    snprintf(name.text, sizeof name.text, "%s%s%s%s%s", stage,
             c->wire_dtype == ZERO_BF16 ? ", bf16 on the wire" : "", *states ? ", " : "",
             tune_is_inexact(&c->states) ? "inexact: " : "", states);
    return name;
}

struct tune_name tune_name(const struct candidate *c)
{
    struct tune_name name = tune_kind_name(c);
    size_t n = strlen(name.text);
    if (c->stage == 3)
        snprintf(name.text + n, sizeof name.text - n, ", prefetch %d, budget %s", c->prefetch,
                 c->budget < 0 ? "auto" : report_bytes(c->budget).text);
    return name;
}

/* ---- the lines to paste: the stage, and whatever differs from ZERO_CONFIG_INIT ---- */

#define N_LINES 17

/* A field of struct zero_config, without "cfg.", and its value in C and in the environment ("": it has no
 * variable). */
struct setting {
    const char *key;
    char c_value[32], env_value[32];
};

static void set(struct setting *s, const char *key, const char *c_value, const char *env_value)
{
    s->key = key;
    snprintf(s->c_value, sizeof s->c_value, "%s", c_value);
    snprintf(s->env_value, sizeof s->env_value, "%s", env_value);
}

static void set_number(struct setting *s, const char *key, int64_t n)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)n);
    set(s, key, text, text);
}

/* Adds up to three settings of a pipeline, and returns their number. */
static int pipeline_settings(const struct plan_options *o, struct setting out[3])
{
    static const char *const names[] = {[ZERO_SCHEDULE_1F1B] = "ZERO_SCHEDULE_1F1B",
                                        [ZERO_SCHEDULE_GPIPE] = "ZERO_SCHEDULE_GPIPE",
                                        [ZERO_SCHEDULE_INTERLEAVED] = "ZERO_SCHEDULE_INTERLEAVED",
                                        [ZERO_SCHEDULE_ZERO_BUBBLE] = "ZERO_SCHEDULE_ZERO_BUBBLE"};
    int n = 0;
    set_number(&out[n++], "mesh.pp", o->pp);
    if (o->schedule != ZERO_SCHEDULE_1F1B)
        set(&out[n++], "pipeline.schedule", names[o->schedule], option_word_of(pipe_schedules, o->schedule));
    if (o->stages_per_rank > 1) {
        set_number(&out[n], "pipeline.stages_per_rank", o->stages_per_rank);
        out[n++].env_value[0] = 0;
    }
    return n;
}

/* Adds a setting that is one of an enum: "ZERO_MASTERS_REMAINDER" and "remainder". */
static void set_word(struct setting *s, const char *key, const char *prefix, const char *word)
{
    set(s, key, prefix, word);
    for (size_t n = strlen(s->c_value); *word && n + 1 < sizeof s->c_value; word++, n++) {
        s->c_value[n] = (char)(*word >= 'a' && *word <= 'z' ? *word - 'a' + 'A' : *word);
        s->c_value[n + 1] = 0;
    }
}

/* Adds up to four settings of precisions, and returns their number. */
static int states_settings(const struct states_options *s, struct setting out[4])
{
    int n = 0;
    if (s->grad_sum == ZERO_BF16)
        set(&out[n++], "memory.grad_sum_dtype", "ZERO_BF16", "bf16");
    if (s->masters)
        set_word(&out[n++], "optim.masters", "ZERO_MASTERS_", option_word_of(option_masters, s->masters));
    if (s->moments)
        set_word(&out[n++], "optim.moments", "ZERO_MOMENTS_", option_word_of(option_moments, s->moments));
    if (s->states)
        set_word(&out[n++], "memory.states", "ZERO_STATES_", option_word_of(option_states, s->states));
    return n;
}

/* Returns the number of settings. */
static int settings_of(const struct tune_options *o, const struct candidate *c, struct setting out[N_LINES])
{
    const struct zero_config init = ZERO_CONFIG_INIT;
    int n = 0;
    set_number(&out[n++], "stage", c->stage);
    if (plan_cp(&o->plan) > 1)
        set_number(&out[n++], "mesh.cp", plan_cp(&o->plan));
    if (plan_tp(&o->plan) > 1)
        set_number(&out[n++], "mesh.tp", plan_tp(&o->plan));
    if (o->plan.pp > 1)
        n += pipeline_settings(&o->plan, &out[n]);
    if (o->plan.accum != init.grad_accum_steps)
        set_number(&out[n++], "grad_accum_steps", o->plan.accum);
    if (c->hybrid)
        set_number(&out[n++], "mesh.dp_replicate", tune_n_dp(o) / c->dp_shard);
    if (c->hybrid == HYBRID_HFSDP)
        set(&out[n++], "hybrid", "ZERO_HFSDP", "hfsdp");
    if (c->prefetch != init.memory.prefetch)
        set_number(&out[n++], "memory.prefetch", c->prefetch);
    if (c->budget != init.memory.param_budget_bytes)
        set_number(&out[n++], "memory.param_budget_bytes", c->budget);
    if (c->wire_dtype)
        set(&out[n++], "memory.wire_dtype", "ZERO_BF16", "bf16");
    if (c->deterministic != init.deterministic)
        set_number(&out[n++], "deterministic", c->deterministic);
    return n + states_settings(&c->states, &out[n]);
}

/* Writes a line such as "cfg.stage = 3;". */
static const char *c_line(const struct setting *s, char text[96])
{
    snprintf(text, 96, "cfg.%s = %s;", s->key, s->c_value);
    return text;
}

/* Writes a line such as "ZERO_STAGE=3 ZERO_PREFETCH=1". */
static const char *environment(const struct setting *s, int n, char text[512])
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        if (!s[i].env_value[0])
            continue;
        char name[32];
        size_t k = 0;
        const char *key = strrchr(s[i].key, '.') ? strrchr(s[i].key, '.') + 1 : s[i].key;
        for (; key[k]; k++)
            name[k] = key[k] == '_' ? '_' : (char)(key[k] - 'a' + 'A');
        name[k] = 0;
        used += (size_t)snprintf(text + used, 512 - used, "%sZERO_%s=%s", i ? " " : "", name, s[i].env_value);
    }
    return text;
}

/* ---- why a candidate is not the choice ---- */

/* A text of the column "why not", or of the probe. */
struct reason_text {
    char text[160];
};

/* Such as "1.2 MB more between hosts". */
static struct reason_text reason_more(int64_t bytes, const char *what)
{
    struct reason_text w;
    snprintf(w.text, sizeof w.text, "%s more %s", report_bytes(bytes).text, what);
    return w;
}

static struct reason_text reason_is(const char *text)
{
    struct reason_text w;
    snprintf(w.text, sizeof w.text, "%s", text);
    return w;
}

static struct reason_text why_not(const struct tune_options *o, const struct candidate *c,
                                  const struct candidate *chosen)
{
    enum tune_reason reason;
    int order = tune_compare(chosen, c, &reason);
    if (!order)
        return reason_is("chosen");
    if (!c->fits)
        return reason_more(tune_limited_bytes(c) - o->limit, "than the limit");
    if (c->refused)
        return reason_is("rounds gradients to bf16 on their way; --wire-dtype any allows it");
    if (order > 0)
        return reason_is(c->n_ms ? "slower in the probe" : "before the choice, but not probed itself");
    switch (reason) {
    case TUNE_HIDDEN:
        return reason_is("gathers nothing ahead: compute waits for every gather");
    case TUNE_BETWEEN:
        return reason_more(c->between_bytes - chosen->between_bytes, "between hosts");
    case TUNE_ALL:
        return reason_more(c->wire_bytes - chosen->wire_bytes, "in all");
    case TUNE_PREFETCH:
        return reason_is("as many bytes, but gathers less far ahead");
    case TUNE_MEMORY:
        return reason_more(c->bytes.total - chosen->bytes.total, "memory for the same bytes");
    default:
        return reason_is("the same bytes and memory, but not as simple");
    }
}

/* Returns what a choice gives up, or NULL. It follows zero_wrap's default of cfg.deterministic. */
static const char *note_on(const struct tune_options *o, const struct candidate *c)
{
    bool not_fixed =
        c->hybrid && o->plan.accum > 1 && c->deterministic == ZERO_AUTO && o->plan.device == ZERO_DEVICE_HOST;
    if (not_fixed)
        return "its groups add micro-batches up in no fixed order, so it ends in other bits than stage 3; "
               "--deterministic on keeps them, for more bytes";
    return tune_is_inexact(&c->states)
               ? "its precision is inexact: it rounds more than f32 does, so training ends in other bits"
               : NULL;
}

/* ---- for people ---- */

/* Median and quartiles, or "" if the candidate was not probed. */
static struct reason_text probe_text(const struct candidate *c)
{
    struct reason_text w = {""};
    if (c->n_ms)
        snprintf(w.text, sizeof w.text, "%.1f (%.1f to %.1f)", tune_median_ms(c), tune_lower_ms(c),
                 tune_upper_ms(c));
    return w;
}

static void print_row(const struct tune_options *o, const struct candidates *c, int64_t i, int64_t chosen,
                      int width)
{
    const struct candidate *candidate = &c->all[i];
    char prefetch[16] = "", budget[24] = "";
    if (candidate->stage == 3) {
        snprintf(prefetch, sizeof prefetch, "%d", candidate->prefetch);
        snprintf(budget, sizeof budget, "%s",
                 candidate->budget < 0 ? "auto" : report_bytes(candidate->budget).text);
    }
    printf("%5lld  %-*s %8s %8s %8s %13s %8s", (long long)i + 1, width, tune_kind_name(candidate).text,
           prefetch, budget, report_bytes(candidate->bytes.total).text,
           report_bytes(candidate->between_bytes).text, report_bytes(candidate->wire_bytes).text);
    if (tune_probed(c))
        printf("  %24s", probe_text(candidate).text);
    printf("  %s\n", why_not(o, candidate, &c->all[chosen]).text);
}

/* The report shows the first of each kind, the chosen one, and those that were probed. */
static bool is_shown(const struct candidates *c, int64_t i, int64_t chosen)
{
    if (i == chosen || c->all[i].n_ms)
        return true;
    for (int64_t k = 0; k < i; k++)
        if (tune_same_kind(&c->all[k], &c->all[i]))
            return false;
    return true;
}

static void print_mesh(const struct plan_options *o, int64_t n_dp)
{
    struct model_config sizes = plan_sizes(&o->model.config, o->params);
    printf("Data on %lld ranks", (long long)n_dp);
    if (plan_cp(o) > 1)
        printf(", each row on %lld", (long long)plan_cp(o));
    if (plan_tp(o) > 1)
        printf(", each layer in %lld parts", (long long)plan_tp(o));
    if (o->pp > 1)
        printf(", %lld pipeline stages by %s with %lld micro-batches of %lld x %lld tokens; the numbers are "
               "those of the rank with the most",
               (long long)(o->pp * o->stages_per_rank), option_word_of(pipe_schedules, o->schedule),
               (long long)o->accum, (long long)o->batch, (long long)sizes.context);
    printf(
        ".\nNot counted is what ranks send along these axes, because it is the same for all candidates.\n");
}

static void print_head(const struct tune_options *o, const struct candidates *c)
{
    int64_t hosts = o->plan.world / o->per_host, n_dp = tune_n_dp(o);
    printf("%lld parameters%s in %d units, %s, %s, %lld ranks on ", (long long)c->n_params,
           plan_tp(&o->plan) > 1 ? " of a part" : "", c->n_units,
           option_word_of(option_dtypes, o->plan.dtype), option_word_of(option_optimizers, o->plan.optimizer),
           (long long)o->plan.world);
    if (hosts == 1)
        printf("one host");
    else
        printf("%lld hosts of %lld", (long long)hosts, (long long)o->per_host);
    printf("; %s%s per rank\n", o->limit ? "at most " : "no limit of memory",
           o->limit ? report_bytes(o->limit).text : "");
    if (n_dp < o->plan.world)
        print_mesh(&o->plan, n_dp);
    printf("\n");
}

static const char *chosen_by(const struct candidates *c, int64_t chosen)
{
    return chosen           ? "the probe"
           : tune_probed(c) ? "the order, than which the probe found nothing faster"
                            : "the order";
}

static void print_choice(const struct tune_options *o, const struct candidate *c, const char *by)
{
    struct setting s[N_LINES];
    char text[512];
    int n = settings_of(o, c, s);
    printf("\nChosen, by %s: %s\n\nin the program, after ZERO_CONFIG_INIT:\n", by, tune_name(c).text);
    for (int i = 0; i < n; i++)
        printf("    %s\n", c_line(&s[i], text));
    printf("or in its environment:\n    %s\n", environment(s, n, text));
    for (int i = 0; i < n; i++)
        if (!s[i].env_value[0])
            printf("and in the program, as it has no variable:\n    %s\n", c_line(&s[i], text));
}

/* The width of the column of names. */
static int width_of(const struct candidates *c, int64_t chosen)
{
    size_t width = 37;
    for (int64_t i = 0; i < c->n; i++) {
        size_t n = is_shown(c, i, chosen) ? strlen(tune_kind_name(&c->all[i]).text) : 0;
        width = n > width ? n : width;
    }
    return (int)width;
}

static void print_titles(bool probed, int width)
{
    printf("%5s  %-*s %8s %8s %8s %13s %8s", "order", width, "candidate", "prefetch", "budget", "memory",
           "between hosts", "in all");
    if (probed)
        printf("  %24s", "ms (half of the steps)");
    printf("  %s\n", "why not");
}

void tune_report(const struct tune_options *o, const struct candidates *c, int64_t chosen)
{
    int64_t n_shown = 0;
    int width = width_of(c, chosen);
    print_head(o, c);
    print_titles(tune_probed(c), width);
    for (int64_t i = 0; i < c->n; i++) {
        if (is_shown(c, i, chosen)) {
            print_row(o, c, i, chosen, width);
            n_shown++;
        }
    }
    printf("\nMemory is libzero's, per rank; bytes are received by a rank in a step. Of %lld candidates the "
           "%lld "
           "shown are\nthe first of each kind%s; --json has all.\n",
           (long long)c->n, (long long)n_shown, tune_probed(c) ? ", and those that were probed" : "");
    if (!chosen && o->per_host < o->plan.world)
        printf("\nThe first of the order also takes the least time for its bytes wherever one between hosts "
               "takes at "
               "least %.2f times\nas long as one inside.\n",
               tune_ratio(c, chosen) > 1 ? tune_ratio(c, chosen) : 1.0);
    print_choice(o, &c->all[chosen], chosen_by(c, chosen));
    if (note_on(o, &c->all[chosen]))
        printf("Note: %s.\n", note_on(o, &c->all[chosen]));
}

/* ---- for programs ---- */

static json_t *probe_json(const struct candidate *c)
{
    return c->n_ms ? json_pack("{s:I, s:o, s:o, s:o}", "steps", (json_int_t)c->n_ms, "ms_median",
                               report_number(tune_median_ms(c)), "ms_lower", report_number(tune_lower_ms(c)),
                               "ms_upper", report_number(tune_upper_ms(c)))
                   : json_null();
}

static json_t *candidate_json(const struct tune_options *o, const struct candidates *c, int64_t i,
                              int64_t chosen)
{
    const struct candidate *candidate = &c->all[i];
    json_t *hybrid =
        candidate->hybrid ? json_string(option_word_of(option_hybrids, candidate->hybrid)) : json_null();
    json_t *line = json_pack(
        "{s:s, s:I, s:i, s:o, s:o, s:I, s:I, s:I, s:i, s:o, s:o, s:o, s:o, s:o, s:b, s:I, s:I, s:o, s:s}",
        "event", "candidate", "order", (json_int_t)i + 1, "stage", candidate->stage, "hybrid", hybrid,
        "dp_shard", candidate->hybrid ? json_integer(candidate->dp_shard) : json_null(), "tp",
        (json_int_t)plan_tp(&o->plan), "pp", (json_int_t)o->plan.pp, "pp_rank",
        (json_int_t)candidate->pp_rank, "prefetch", candidate->prefetch, "budget",
        candidate->budget < 0 ? json_null() : json_integer(candidate->budget), "wire_dtype",
        candidate->wire_dtype ? json_string(option_word_of(option_dtypes, candidate->wire_dtype))
                              : json_null(),
        "deterministic", candidate->deterministic < 0 ? json_null() : json_boolean(candidate->deterministic),
        "bytes", report_bytes_json(&candidate->bytes), "limit",
        o->limit ? json_integer(o->limit) : json_null(), "fits", candidate->fits, "between_bytes",
        (json_int_t)candidate->between_bytes, "wire_bytes", (json_int_t)candidate->wire_bytes, "probe",
        probe_json(candidate), "why", why_not(o, candidate, &c->all[chosen]).text);
    states_add_json(&candidate->states, line);
    json_object_set_new(line, "inexact", json_boolean(tune_is_inexact(&candidate->states)));
    return line;
}

void tune_report_json(const struct tune_options *o, const struct candidates *c, int64_t chosen)
{
    struct setting s[N_LINES];
    char text[512];
    int n = settings_of(o, &c->all[chosen], s);
    for (int64_t i = 0; i < c->n; i++)
        report_line(candidate_json(o, c, i, chosen));
    json_t *lines = json_array(), *choice = candidate_json(o, c, chosen, chosen);
    for (int i = 0; i < n; i++)
        json_array_append_new(lines, json_string(c_line(&s[i], text)));
    json_object_set_new(choice, "event", json_string("choice"));
    json_object_set_new(choice, "by", json_string(chosen ? "probe" : "order"));
    json_object_set_new(choice, "least_ratio", chosen ? json_null() : report_number(tune_ratio(c, 0)));
    const char *note = note_on(o, &c->all[chosen]);
    json_object_set_new(choice, "note", note ? json_string(note) : json_null());
    json_object_set_new(choice, "c", lines);
    json_object_set_new(choice, "environment", json_string(environment(s, n, text)));
    report_line(choice);
}
