/* SPDX-License-Identifier: Apache-2.0 */
/* config_keys.c: the table of configuration fields, and what works field by field: setting from text, setting
 * from the environment, and checking. */
#include "shard/plan.h"
#include "zero/config.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum kind { KIND_INT32, KIND_INT64, KIND_BYTES, KIND_FLOAT, KIND_DOUBLE, KIND_FIXED };
enum where { TEXT_ONLY, TEXT_AND_ENV }; /* environment: the fields marked + in zero_config.h */

struct choice {
    const char *name;
    int32_t value;
};

#define BACKEND_NAME(name, value, key, text) {#key, value},
static const struct choice backend_names[] = {{"auto", ZERO_BACKEND_AUTO},
                                              ZERO_BACKEND_MAP(BACKEND_NAME){NULL, 0}};
static const struct choice device_names[] = {
    {"host", ZERO_DEVICE_HOST}, {"cuda", ZERO_DEVICE_CUDA}, {NULL, 0}};
#define OPTIMIZER_NAME(name, value, key, text) {#key, value},
static const struct choice optimizer_names[] = {ZERO_OPTIMIZER_MAP(OPTIMIZER_NAME){NULL, 0}};
static const struct choice dtype_names[] = {
    {"f32", ZERO_F32}, {"bf16", ZERO_BF16}, {"f16", ZERO_F16}, {NULL, 0}};
static const struct choice masters_names[] = {
    {"f32", ZERO_MASTERS_F32}, {"remainder", ZERO_MASTERS_REMAINDER}, {"none", ZERO_MASTERS_NONE}, {NULL, 0}};
static const struct choice moments_names[] = {
    {"f32", ZERO_MOMENTS_F32}, {"bf16", ZERO_MOMENTS_BF16}, {"q8", ZERO_MOMENTS_Q8}, {NULL, 0}};
static const struct choice states_names[] = {
    {"device", ZERO_STATES_DEVICE}, {"host", ZERO_STATES_HOST}, {"file", ZERO_STATES_FILE}, {NULL, 0}};
static const struct choice switch_names[] = {{"on", 1}, {"off", 0}, {NULL, 0}};
static const struct choice init_names[] = {{"model", ZERO_INIT_MODEL},
                                           {"rank0", ZERO_INIT_RANK0},
                                           {"later", ZERO_INIT_LATER},
                                           {"call", ZERO_INIT_CALL},
                                           {NULL, 0}};
static const struct choice hybrid_names[] = {{"hsdp", ZERO_HSDP}, {"hfsdp", ZERO_HFSDP}, {NULL, 0}};
static const struct choice schedule_names[] = {{"1f1b", ZERO_SCHEDULE_1F1B},
                                               {"gpipe", ZERO_SCHEDULE_GPIPE},
                                               {"interleaved", ZERO_SCHEDULE_INTERLEAVED},
                                               {"zero-bubble", ZERO_SCHEDULE_ZERO_BUBBLE},
                                               {NULL, 0}};
static const struct choice prefetch_names[] = {{"none", 0}, {NULL, 0}};

struct field {
    const char *group, *key; /* group: the struct around the field, with its dot, or "" */
    size_t offset, bytes;
    enum kind kind;
    enum where where;
    const struct choice *names;
    bool may_be_auto;    /* ZERO_AUTO is allowed too, as the text "auto". */
    double lo, hi;       /* inclusive */
    const char *allowed; /* KIND_FIXED: why text cannot set it */
};

/* Fails to compile if the kind does not match the field's type. */
#define BYTES_OF_KIND_INT32  4
#define BYTES_OF_KIND_INT64  8
#define BYTES_OF_KIND_BYTES  8
#define BYTES_OF_KIND_FLOAT  4
#define BYTES_OF_KIND_DOUBLE 8
#define FIELD(group, name, kind_, where_, names_, lo_, hi_, allowed_)                                        \
    ANY_FIELD(group, name, kind_, where_, names_, false, lo_, hi_, allowed_)
#define FIELD_OR_AUTO(group, name, kind_, where_, names_, lo_, hi_, allowed_)                                \
    ANY_FIELD(group, name, kind_, where_, names_, true, lo_, hi_, allowed_)
#define ANY_FIELD(group, name, kind_, where_, names_, auto_, lo_, hi_, allowed_)                             \
    {                                                                                                        \
#group, #name, offsetof(struct zero_config, group name),                                             \
            sizeof(((struct zero_config *)0)->group name) /                                                  \
                (sizeof(((struct zero_config *)0)->group name) == BYTES_OF_##kind_),                         \
            kind_, where_, names_, auto_, lo_, hi_, allowed_                                                 \
    }
#define FIXED(group, name, why)                                                                              \
    {                                                                                                        \
#group, #name, offsetof(struct zero_config, group name),                                             \
            sizeof(((struct zero_config *)0)->group name), KIND_FIXED, TEXT_ONLY, NULL, false, 0, 0, why     \
    }

#define BELOW_ONE  0x1.fffffep-1 /* the largest float below 1 */
#define COUNT_MAX  2147483647.0
#define MAX_STAGES 1024.0
#define POINTER    "a pointer: set the field itself"
#define HEAD       "set by ZERO_CONFIG_INIT"

/* The fields in the order of the struct. */
static const struct field fields[] = {
    FIXED(, size, HEAD),
    FIXED(, version, HEAD),
    FIELD(, stage, KIND_INT32, TEXT_AND_ENV, NULL, 0, 3, "0, 1, 2, 3"),
    FIELD(, device, KIND_INT32, TEXT_AND_ENV, device_names, 1, 2, "host, cuda"),
    FIXED(, stream, POINTER),
    FIELD(, grad_accum_steps, KIND_INT32, TEXT_AND_ENV, NULL, 1, COUNT_MAX, "1 and more"),
    FIELD(, max_grad_accum_steps, KIND_INT32, TEXT_AND_ENV, NULL, 0, COUNT_MAX,
          "1 and more, or 0 for grad_accum_steps"),
    FIELD(, clip, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, FLT_MAX, "a finite number, 0 or more"),
    FIELD(, grad_scale, KIND_DOUBLE, TEXT_AND_ENV, NULL, -DBL_MAX, DBL_MAX, "a finite number other than 0"),
    FIELD(, grad_sum, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1, "0, 1"),
    FIELD_OR_AUTO(, deterministic, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1,
                  "on (1), off (0), auto (-1)"),
    FIELD(, hybrid, KIND_INT32, TEXT_AND_ENV, hybrid_names, 0, 1,
          "hsdp (0), hfsdp (1); for neither, set dp_replicate to 1"),
    FIELD(mesh., pp, KIND_INT32, TEXT_AND_ENV, NULL, 1, COUNT_MAX, "1 and more"),
    FIELD_OR_AUTO(mesh., dp_replicate, KIND_INT32, TEXT_AND_ENV, NULL, 1, COUNT_MAX,
                  "1 and more; auto (-1) for one replica per host"),
    FIELD(mesh., dp_shard, KIND_INT32, TEXT_AND_ENV, NULL, 0, COUNT_MAX,
          "1 and more, or 0 for what the other axes leave"),
    FIELD(mesh., cp, KIND_INT32, TEXT_AND_ENV, NULL, 1, ZR_AXIS_RANKS, "1 to 64"),
    FIELD(mesh., tp, KIND_INT32, TEXT_AND_ENV, NULL, 1, ZR_AXIS_RANKS, "1 to 64"),
    FIELD(optim., optimizer, KIND_INT32, TEXT_AND_ENV, optimizer_names, 1, ZR_OPTIMIZER_COUNT - 1,
          ZR_OPTIMIZER_KEYS),
    FIELD(optim., lr_scale, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, FLT_MAX, "a finite number, 0 or more"),
    FIELD_OR_AUTO(optim., beta1, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, BELOW_ONE,
                  "0 and more, less than 1; auto (-1)"),
    FIELD_OR_AUTO(optim., beta2, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, BELOW_ONE,
                  "0 and more, less than 1; auto (-1)"),
    FIELD_OR_AUTO(optim., eps, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, FLT_MAX,
                  "a finite number, 0 or more; auto (-1)"),
    FIELD(optim., weight_decay, KIND_FLOAT, TEXT_AND_ENV, NULL, 0, FLT_MAX, "a finite number, 0 or more"),
    FIELD(optim., masters, KIND_INT32, TEXT_AND_ENV, masters_names, 0, 2, "f32 (0), remainder (1), none (2)"),
    FIELD(optim., moments, KIND_INT32, TEXT_AND_ENV, moments_names, 0, 2, "f32 (0), bf16 (1), q8 (2)"),
    FIELD(optim., n_states, KIND_INT32, TEXT_ONLY, NULL, 0, ZR_MAX_STATES, "0, 1, 2, 3, 4"),
    FIXED(optim., update, POINTER),
    FIXED(optim., update_arg, POINTER),
    FIXED(, optim_groups, POINTER),
    FIXED(, n_optim_groups, "the length of optim_groups: set the field itself"),
    FIELD(memory., prefetch, KIND_INT32, TEXT_AND_ENV, prefetch_names, 0, COUNT_MAX,
          "1 and more, or 0 for none"),
    FIELD_OR_AUTO(memory., param_budget_bytes, KIND_BYTES, TEXT_AND_ENV, NULL, 0, 0x1p63,
                  "bytes, with k, M, G, T or Ki, Mi, Gi, Ti; auto (-1) for what prefetch needs"),
    FIELD(memory., wire_dtype, KIND_INT32, TEXT_AND_ENV, dtype_names, 0, 2,
          "f32, bf16, or 0 for the tensor's own"),
    FIELD(memory., grad_in_place, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1, "0, 1"),
    FIELD(memory., grad_sum_dtype, KIND_INT32, TEXT_AND_ENV, dtype_names, 0, 2, "f32, bf16, or 0 for f32"),
    FIELD(memory., states, KIND_INT32, TEXT_AND_ENV, states_names, 0, 2, "device (0), host (1), file (2)"),
    FIXED(memory., states_dir, "a pointer: set the field itself, or ZERO_STATES_DIR in the environment"),
    FIELD(memory., seed, KIND_INT64, TEXT_AND_ENV, NULL, 0, 0x1p53 - 1, "0 to 9007199254740991"),
    FIXED(memory., n_order, "the length of order: set the field itself"),
    FIXED(memory., order, POINTER),
    FIELD(pipeline., schedule, KIND_INT32, TEXT_AND_ENV, schedule_names, 0, 3,
          "1f1b (0), gpipe (1), interleaved (2), zero-bubble (3)"),
    FIXED(pipeline., schedule_file, POINTER),
    FIELD(pipeline., stages_per_rank, KIND_INT32, TEXT_ONLY, NULL, 1, MAX_STAGES, "1 to 1024"),
    FIELD(pipeline., activation_bytes, KIND_BYTES, TEXT_ONLY, NULL, 0, 0x1p40, "0 to 1Ti"),
    FIELD(launch., rank, KIND_INT32, TEXT_ONLY, NULL, 0, COUNT_MAX, "0 to world - 1"),
    FIELD(launch., world, KIND_INT32, TEXT_ONLY, NULL, 0, COUNT_MAX,
          "1 and more, or 0 to look in the environment"),
    FIXED(launch., rendezvous, "a pointer: set the field itself, or ZERO_RENDEZVOUS in the environment"),
    FIXED(launch., interface, "a pointer: set the field itself, or ZERO_INTERFACE in the environment"),
    FIELD(launch., timeout_ms, KIND_INT64, TEXT_AND_ENV, NULL, 1, COUNT_MAX, "1 to 2147483647"),
    FIELD_OR_AUTO(launch., start_timeout_ms, KIND_INT64, TEXT_AND_ENV, NULL, 1, COUNT_MAX,
                  "1 to 2147483647; auto (-1): 600000, or timeout_ms if that is longer"),
    FIXED(launch., name, POINTER),
    FIELD(launch., backend, KIND_INT32, TEXT_AND_ENV, backend_names, 0, ZR_BACKEND_COUNT - 1,
          "auto" ZR_BACKEND_KEYS),
    FIXED(launch., mpi_comm, POINTER),
    FIXED(launch., nccl_comm, POINTER),
    FIXED(launch., exchange, POINTER),
    FIXED(launch., exchange_arg, POINTER),
    FIELD_OR_AUTO(launch., copy_engine, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1,
                  "on (1), off (0), auto (-1)"),
    FIELD(checkpoint., save_async, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1, "0, 1"),
    FIELD(checkpoint., save_keep, KIND_INT32, TEXT_AND_ENV, NULL, 0, COUNT_MAX, "1 and more, or 0 for all"),
    FIELD(debug., check, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1, "0, 1"),
    FIELD(debug., trace, KIND_INT32, TEXT_AND_ENV, switch_names, 0, 1, "0, 1"),
    FIXED(debug., log, POINTER),
    FIXED(debug., log_arg, POINTER),
    FIELD(, init_from, KIND_INT32, TEXT_ONLY, init_names, 0, 3, "model (0), rank0 (1), later (2), call (3)"),
    FIXED(, init, POINTER),
    FIXED(, init_arg, POINTER),
};
#define N_FIELDS (sizeof fields / sizeof *fields)

/* Variables that other parts of libzero read. They are not misspelt fields. */
static const char *const other_variables[] = {
    "ZERO_RANK",       "ZERO_WORLD_SIZE",   "ZERO_LOCAL_RANK", "ZERO_RENDEZVOUS", "ZERO_JOB",
    "ZERO_JOB_KEY",    "ZERO_JOB_KEY_FILE", "ZERO_ATTEMPT",    "ZERO_ISA",        "ZERO_POISON",
    "ZERO_FAIL_ALLOC", "ZERO_LOG",          "ZERO_HOST_ID",    "ZERO_PROGRESS",   "ZERO_INTERFACE",
    "ZERO_FLIGHT_DIR", "ZERO_FLIGHT_FD",    "ZERO_STATES_DIR",
};

union value {
    int64_t i;
    double f;
};

static bool is_real(const struct field *f)
{
    return f->kind == KIND_FLOAT || f->kind == KIND_DOUBLE;
}

static bool in_range(const struct field *f, union value v)
{
    double x = is_real(f) ? v.f : (double)v.i;
    if (f->may_be_auto && x == ZERO_AUTO)
        return true;
    bool zero_scale = f->kind == KIND_DOUBLE && x == 0; /* The only double is a factor of every gradient. */
    return isfinite(x) && x >= f->lo && x <= f->hi && !zero_scale;
}

static union value load(const struct zero_config *cfg, const struct field *f)
{
    const char *at = (const char *)cfg + f->offset;
    union value v = {0};
    int32_t i32;
    float f32;
    switch (f->kind) {
    case KIND_INT32:
        memcpy(&i32, at, sizeof i32);
        v.i = i32;
        break;
    case KIND_INT64:
    case KIND_BYTES:
        memcpy(&v.i, at, sizeof v.i);
        break;
    case KIND_FLOAT:
        memcpy(&f32, at, sizeof f32);
        v.f = (double)f32;
        break;
    case KIND_DOUBLE:
        memcpy(&v.f, at, sizeof v.f);
        break;
    case KIND_FIXED:
        break;
    }
    return v;
}

static void store(struct zero_config *cfg, const struct field *f, union value v)
{
    char *at = (char *)cfg + f->offset;
    int32_t i32 = (int32_t)v.i;
    float f32 = (float)v.f;
    switch (f->kind) {
    case KIND_INT32:
        memcpy(at, &i32, sizeof i32);
        break;
    case KIND_INT64:
    case KIND_BYTES:
        memcpy(at, &v.i, sizeof v.i);
        break;
    case KIND_FLOAT:
        memcpy(at, &f32, sizeof f32);
        break;
    case KIND_DOUBLE:
        memcpy(at, &v.f, sizeof v.f);
        break;
    case KIND_FIXED:
        break;
    }
}

/* Parses decimal digits with at most one sign. Sizes may end in a unit. */
static bool parse_integer(const char *text, bool with_unit, int64_t *out)
{
    static const struct {
        const char *name;
        int64_t factor;
    } units[] = {{"k", 1000},
                 {"K", 1000},
                 {"M", 1000000},
                 {"G", 1000000000},
                 {"T", 1000000000000},
                 {"Ki", INT64_C(1) << 10},
                 {"Mi", INT64_C(1) << 20},
                 {"Gi", INT64_C(1) << 30},
                 {"Ti", INT64_C(1) << 40}};
    const char *digits = text + (*text == '-' || *text == '+');
    if (*digits < '0' || *digits > '9')
        return false;
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (errno)
        return false;
    int64_t factor = 1;
    if (*end && with_unit) {
        size_t n_end = strlen(end);
        if (n_end > 1 && end[n_end - 1] == 'B') /* "64MiB" is "64Mi" */
            n_end--;
        for (size_t i = 0; i < sizeof units / sizeof *units; i++)
            if (strlen(units[i].name) == n_end && !memcmp(units[i].name, end, n_end))
                factor = units[i].factor;
        if (factor == 1)
            return false;
    } else if (*end) {
        return false;
    }
    return !__builtin_mul_overflow((int64_t)n, factor, out);
}

/* Parses a finite number with a decimal point, whatever the locale of the program is. */
static bool parse_real(const char *text, bool is_float, double *out)
{
    if (!*text || isspace((unsigned char)*text))
        return false;
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c)
        return false;
    char *end;
    double x = strtod_l(text, &end, c);
    freelocale(c);
    if (*end || !isfinite(x))
        return false;
    /* A number too small for the field would become 0. */
    if (x != 0 && (is_float ? (double)(float)x : x) == 0)
        return false;
    *out = is_float && fabs(x) <= (double)FLT_MAX ? (double)(float)x : x;
    return true;
}

static bool parse(const struct field *f, const char *text, union value *out)
{
    for (const struct choice *c = f->names; c && c->name; c++) {
        if (!strcasecmp(c->name, text)) {
            out->i = c->value;
            return true;
        }
    }
    if (f->may_be_auto && !strcasecmp(text, "auto")) {
        if (is_real(f))
            out->f = ZERO_AUTO;
        else
            out->i = ZERO_AUTO;
        return true;
    }
    return is_real(f) ? parse_real(text, f->kind == KIND_FLOAT, &out->f)
                      : parse_integer(text, f->kind == KIND_BYTES, &out->i);
}

/* label: the key or variable that the user wrote. */
static int set_text(struct zero_config *cfg, const struct field *f, const char *label, const char *text)
{
    union value v = {0};
    if (!parse(f, text, &v) || !in_range(f, v))
        return zr_fail(ZERO_ERR_ARG, "%s is \"%s\"; allowed: %s", label, text, f->allowed);
    store(cfg, f, v);
    return 0;
}

static const struct choice *find_choice(const struct field *f, int64_t value)
{
    const struct choice *c = f->names;
    while (c && c->name && c->value != value)
        c++;
    return c && c->name ? c : NULL;
}

static int check_field(const struct zero_config *cfg, const struct field *f)
{
    union value v = load(cfg, f);
    if (in_range(f, v))
        return 0;
    if (is_real(f))
        return zr_fail(ZERO_ERR_ARG, "%s is %.9g; allowed: %s", f->key, v.f, f->allowed);
    const struct choice *c = find_choice(f, v.i);
    if (c)
        return zr_fail(ZERO_ERR_ARG, "%s is %s; allowed: %s", f->key, c->name, f->allowed);
    return zr_fail(ZERO_ERR_ARG, "%s is %" PRId64 "; allowed: %s", f->key, v.i, f->allowed);
}

struct zr_value_text zr_config_value_text(const char *key, double value)
{
    struct zr_value_text out;
    const struct choice *c = NULL;
    for (size_t i = 0; i < N_FIELDS; i++)
        if (fields[i].names && fields[i].names != switch_names && !strcmp(key, fields[i].key))
            c = find_choice(&fields[i], (int64_t)value);
    if (c)
        snprintf(out.text, sizeof out.text, "%s", c->name);
    else /* a seed or a number of bytes has more digits than a float */
        snprintf(out.text, sizeof out.text, "%.*g", fabs(value) < 0x1p53 && value == floor(value) ? 16 : 9,
                 value);
    return out;
}

int zr_config_check_number(const char *key, double value, double *out)
{
    size_t i = 0;
    while (strcmp(key, fields[i].key) != 0)
        i++;
    const struct field *f = &fields[i];
    *out = f->kind == KIND_FLOAT ? (double)(float)value : value;
    bool vanishes = value != 0 && *out == 0, is_auto = f->may_be_auto && value == ZERO_AUTO;
    if (in_range(f, (union value){.f = *out}) && !vanishes && !is_auto)
        return 0;
    return zr_fail(ZERO_ERR_ARG, "%s is %.9g; allowed: %.*s", key, value, (int)strcspn(f->allowed, ";"),
                   f->allowed);
}

int zr_config_check_fields(const struct zero_config *cfg)
{
    for (size_t i = 0; i < N_FIELDS; i++)
        ZR_TRY(fields[i].kind == KIND_FIXED ? 0 : check_field(cfg, &fields[i]));
    return 0;
}

int zr_config_check_optim(const struct zero_optim *group)
{
    const struct zero_config cfg = {.optim = *group};
    const size_t first = offsetof(struct zero_config, optim), end = first + sizeof cfg.optim;
    int err = 0;
    for (size_t i = 0; !err && i < N_FIELDS; i++)
        if (fields[i].kind != KIND_FIXED && fields[i].offset >= first && fields[i].offset < end)
            err = check_field(&cfg, &fields[i]);
    return err;
}

/* Returns the Levenshtein distance of two texts, ignoring case. Only the first 63 characters count. */
static int distance(const char *a, const char *b)
{
    enum { MAX = 63 };
    size_t n_a = strnlen(a, MAX), n_b = strnlen(b, MAX);
    int row[MAX + 1];
    for (size_t j = 0; j <= n_b; j++)
        row[j] = (int)j;
    for (size_t i = 1; i <= n_a; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= n_b; j++) {
            int best = diagonal + (tolower((unsigned char)a[i - 1]) != tolower((unsigned char)b[j - 1]));
            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[n_b];
}

/* Keys of earlier versions, with the key or the call that replaces them. */
static const struct earlier {
    const char *key, *now, *how;
} earlier_keys[] = {{"shard_group", "dp_replicate", NULL},
                    {"mpi", NULL, "-Dmpi chooses the MPI when libzero is built"},
                    {"mpi_shims", NULL, "the module for MPI lies beside libzero.so"}};

static const struct earlier *find_earlier(const char *key)
{
    for (size_t i = 0; i < sizeof earlier_keys / sizeof *earlier_keys; i++)
        if (!strcasecmp(key, earlier_keys[i].key))
            return &earlier_keys[i];
    return NULL;
}

/* Returns the nearest field, among those that the environment can set or among all. */
static const struct field *nearest(const char *key, bool env_only, int *best)
{
    const struct field *found = NULL;
    const struct earlier *was = find_earlier(key);
    if (was && was->now)
        key = was->now;
    *best = INT_MAX;
    for (size_t i = 0; i < N_FIELDS; i++) {
        if (env_only && fields[i].where != TEXT_AND_ENV)
            continue;
        int d = distance(key, fields[i].key);
        /* "accum" is short for grad_accum_steps. */
        if (d > 1 && strlen(key) > 3 && strcasestr(fields[i].key, key))
            d = 1;
        if (d < *best) {
            *best = d;
            found = &fields[i];
        }
    }
    return found;
}

/* Whether the text is the field's key, alone or after its group: "states" or "memory.states". */
static bool is_key_of(const struct field *f, const char *text)
{
    size_t n = strlen(f->group);
    return !strcmp(strncmp(text, f->group, n) == 0 ? text + n : text, f->key);
}

int zero_config_set(struct zero_config *cfg, const char *key, const char *value)
{
    if (!cfg || !key || !value)
        return zr_fail(ZERO_ERR_ARG, "zero_config_set: %s is NULL", !cfg ? "cfg" : !key ? "key" : "value");
    int err = zr_config_check_head(cfg);
    if (err)
        return zr_fail_more(err, "zero_config_set");
    for (size_t i = 0; i < N_FIELDS; i++) {
        const struct field *f = &fields[i];
        if (!is_key_of(f, key))
            continue;
        if (f->kind == KIND_FIXED)
            return zr_fail(ZERO_ERR_ARG, "%s cannot be set from text: it is %s", key, f->allowed);
        return set_text(cfg, f, key, value);
    }
    const char *dot = strrchr(key, '.'), *name = dot ? dot + 1 : key;
    const struct earlier *was = find_earlier(name);
    if (was && was->how)
        return zr_fail(ZERO_ERR_ARG, "there is no configuration key \"%s\": %s", key, was->how);
    int d;
    const struct field *f = nearest(name, false, &d);
    return zr_fail(ZERO_ERR_ARG, "there is no configuration key \"%s\"; the nearest is \"%s%s\"", key,
                   dot ? f->group : "", f->key);
}

/* Writes the name of the variable: "ZERO_" and the key in capitals. */
static void variable_name(const struct field *f, char *out, size_t out_bytes)
{
    snprintf(out, out_bytes, "ZERO_%s", f->key);
    for (char *p = out; *p; p++)
        *p = (char)toupper((unsigned char)*p);
}

enum { VARIABLE_CHARS = 64 };

/* Finds the known variable that is nearest to name, and returns how far it is. */
static int nearest_variable(const char *name, char known[VARIABLE_CHARS])
{
    int best;
    variable_name(nearest(name + 5, true, &best), known, VARIABLE_CHARS);
    for (size_t i = 0; i < sizeof other_variables / sizeof *other_variables; i++) {
        int d = distance(name, other_variables[i]);
        if (d <= best) {
            best = d;
            snprintf(known, VARIABLE_CHARS, "%s", other_variables[i]);
        }
    }
    return best;
}

/* Warns of each ZERO_ variable that the library does not know, because it is most likely misspelt. Variables
 * of libzero's own tests are ignored. */
static void warn_of_unknown(struct zr_log *log)
{
    for (char **e = environ; e && *e; e++) {
        size_t n = strcspn(*e, "=");
        char name[2 * VARIABLE_CHARS], known[VARIABLE_CHARS];
        if (strncmp(*e, "ZERO_", 5) != 0 || n <= 5 || strncmp(*e, "ZERO_TEST_", 10) == 0)
            continue;
        snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : (int)sizeof name - 1, *e);
        const struct earlier *was = find_earlier(name + 5);
        int d = nearest_variable(name, known);
        if (!strcmp(name, known))
            continue;
        if (was && was->how)
            zr_warn(log, "%s is not known and was ignored: %s", name, was->how);
        else if (d <= 2)
            zr_warn(log, "%s is not known and was ignored; did you mean %s?", name, known);
        else
            zr_warn(log, "%s is not known and was ignored; the nearest is %s", name, known);
    }
}

/* Applies the variable of one field. A field that only zero_config_set can set is skipped. */
static int apply_variable(struct zero_config *cfg, const struct field *f)
{
    char name[64];
    if (f->where != TEXT_AND_ENV)
        return 0;
    variable_name(f, name, sizeof name);
    const char *text = getenv(name);
    return text && *text ? set_text(cfg, f, name, text) : 0;
}

int zr_config_apply_env(struct zero_config *cfg, struct zr_log *log)
{
    for (size_t i = 0; i < N_FIELDS; i++)
        ZR_TRY(apply_variable(cfg, &fields[i]));
    warn_of_unknown(log);
    return 0;
}

void zr_config_apply_legible(struct zero_config *cfg)
{
    for (size_t i = 0; i < N_FIELDS; i++)
        (void)apply_variable(cfg, &fields[i]);
}
