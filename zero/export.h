/* SPDX-License-Identifier: Apache-2.0 */
/* export.h: what a program sees of libzero; everything else is hidden. */
#ifndef ZERO_EXPORT_H
#define ZERO_EXPORT_H

#if defined(__GNUC__)
#define ZERO_API __attribute__((visibility("default")))
#else
#define ZERO_API
#endif

#endif
