# SPDX-License-Identifier: Apache-2.0
"""Draws curves of MFU over the number of GPUs as an SVG picture."""
import html
import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 330, 70, 20, 34, 48
COLOURS = ['#08519c', '#fd8d3c', '#31a354']


def svg(curves):
    """curves: {name: [(number of GPUs, MFU from 0 to 1), ...]}, with the same numbers of GPUs in all curves."""
    worlds = sorted({world for points in curves.values() for world, _ in points})
    least, most = math.log2(worlds[0]), math.log2(worlds[-1])

    def x_of(world):
        return LEFT + (math.log2(world) - least) / (most - least or 1) * (WIDTH - LEFT - RIGHT)

    def y_of(share):
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">']
    for percent in range(0, 101, 20):
        y = y_of(percent / 100)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e7ec"/>'
                   f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#5b6675">{percent}%</text>')
    for world in worlds:
        out.append(f'<text x="{x_of(world):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#5b6675">{world}</text>')
    out.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#5b6675">GPUs</text>')
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        out.append(f'<rect x="{LEFT + 200 * i}" y="6" width="14" height="12" fill="{colour}"/>'
                   f'<text x="{LEFT + 200 * i + 20}" y="17">{html.escape(name)}</text>')
        at = ' '.join(f'{x_of(world):.1f},{y_of(share):.1f}' for world, share in points)
        out.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for world, share in points:
            out.append(f'<circle cx="{x_of(world):.1f}" cy="{y_of(share):.1f}" r="3.5" fill="{colour}">'
                       f'<title>{html.escape(name)}, {world} GPUs: {100 * share:.1f}%</title></circle>')
    return '\n'.join(out) + '</svg>'
