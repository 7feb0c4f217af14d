/* SPDX-License-Identifier: Apache-2.0 */
/* loss_plot.c: turns losses into the curves of plot.h. */
#include "bench/report/loss_plot.h"
#include "bench/report/plot.h"

#include <math.h>

enum { MAX_POINTS = 400, MAX_CURVES = 8 };

/* From wide and light to narrow and dark, so that curves which lie on top of each other stay visible. */
static const char *const styles[] = {"lines lw 11 lc rgb '#c6dbef'",  "lines lw 7.5 lc rgb '#6baed6'",
                                     "lines lw 4 lc rgb '#fd8d3c'",   "lines lw 1.3 lc rgb '#252525'",
                                     "lines lw 1.3 lc rgb '#cb181d'", "lines lw 1.3 lc rgb '#238b45'"};
#define N_STYLES ((int)(sizeof styles / sizeof styles[0]))

/* The number of steps that one point is the mean of. */
static int64_t steps_of_point(const struct loss_curve *curves, int n)
{
    int64_t most = 1;
    for (int i = 0; i < n; i++)
        most = curves[i].n > most ? curves[i].n : most;
    return (most + MAX_POINTS - 1) / MAX_POINTS;
}

/* Leaves out steps whose loss is not finite. */
static void add_points(struct plot_curve *to, const struct loss_curve *c, int64_t each)
{
    for (int64_t i = 0; i < c->n; i += each) {
        double sum = 0;
        int64_t n = 0, end = i + each < c->n ? i + each : c->n;
        for (int64_t k = i; k < end; k++) {
            if (isfinite(c->loss[k])) {
                sum += c->loss[k];
                n++;
            }
        }
        if (n) {
            to->points[to->n][0] = (double)(c->first + i) + (double)(end - i - 1) / 2;
            to->points[to->n++][1] = sum / (double)n;
        }
    }
}

int loss_plot(const char *path, const char *title, const char *prefix, const struct loss_curve *curves, int n)
{
    double points[MAX_CURVES][MAX_POINTS][2];
    struct plot_curve plots[MAX_CURVES] = {0};
    char settings[320], mean[48] = "";
    int64_t each = steps_of_point(curves, n);
    n = n < MAX_CURVES ? n : MAX_CURVES;
    for (int i = 0; i < n; i++) {
        plots[i].points = points[i];
        snprintf(plots[i].title, sizeof plots[i].title, "%s", curves[i].name);
        snprintf(plots[i].style, sizeof plots[i].style, "%s",
                 n == 1 ? "lines lw 2 lc rgb '#2171b5'" : styles[i % N_STYLES]);
        add_points(&plots[i], &curves[i], each);
    }
    if (each > 1)
        snprintf(mean, sizeof mean, " (a point is the mean of %lld)", (long long)each);
    snprintf(settings, sizeof settings,
             "set ylabel 'loss, nats per byte'\n"
             "set grid lc rgb '#dddddd'\n"
             "set border 3\n"
             "set tics nomirror\n"
             "set key right top Left reverse noenhanced\n"
             "set xlabel 'step%s'\n",
             mean);
    return plot_curves(path, prefix, title, settings, plots, n);
}
