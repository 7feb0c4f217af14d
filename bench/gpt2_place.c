/* gpt2_place.c: see gpt2_place.h. */
#include "bench/gpt2_place.h"

static int open_host(struct gpt2_place *p, int n_threads)
{
    int err = zr_host_device_open(&p->dev);
    if (err) {
        return err;
    }
    p->layers = &gpt2_layers_host;
    err = p->dev->ops->stream_open(p->dev, ZR_STREAM_CALLER, "model", NULL, &p->stream);
    return err ? err : zr_gemm_open(n_threads, &p->gemm);
}

int gpt2_place_open(struct gpt2_place *p, bool cuda, int n_threads)
{
    (void)cuda;
    *p = (struct gpt2_place){0};
    int err = open_host(p, n_threads);
    if (err) {
        gpt2_place_close(p);
    }
    return err;
}

void gpt2_place_close(struct gpt2_place *p)
{
    zr_gemm_close(p->gemm);
    if (p->dev) {
        p->dev->ops->stream_close(p->stream);
        p->dev->ops->close(p->dev);
    }
    *p = (struct gpt2_place){0};
}
