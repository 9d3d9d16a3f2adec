// Line charts of the last hour (uPlot), in the page's colours, with a tip at the pointer.
import { html, useEffect, useRef, isDark, zone } from "./core.js";
import uPlot from "./vendor/uplot.js";

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `series`: {title, color ("--s1"), fill, spans: connect over gaps, sparse: so, with a point for each value}. `data`: [times, ...values]. `format` writes values. */
export const LineChart = ({ data, series, format, label, span = 3600 }) => {
  const place = useRef(null), plot = useRef(null), tip = useRef(null);
  const dark = isDark.value, inZone = zone.value;
  useEffect(() => {
    const node = place.current;
    const axis = { stroke: color("--muted"), font: `11px ${color("--sans")}`, ticks: { show: false } };
    const options = {
      width: node.clientWidth || 300, height: node.clientHeight, padding: [8, 4, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      tzDate: zone.peek() === "utc" ? time => uPlot.tzDate(new Date(time * 1000), "Etc/UTC") : undefined,
      scales: {
        x: { time: true, range: () => { const times = plot.current?.data[0] ?? data[0], end = times.at(-1) ?? Date.now() / 1000; return [Math.max(end - span, Math.min(times[0] ?? end, end - 300)), end]; } },
        y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.12 : 1] },
      },
      axes: [
        { ...axis, grid: { show: false }, space: 90, size: 26,
          values: (u, splits) => splits.map(time => new Date(time * 1000).toLocaleTimeString("en-GB",
            { hour: "2-digit", minute: "2-digit", timeZone: zone.peek() === "utc" ? "UTC" : undefined })) },
        { ...axis, grid: { stroke: color("--line"), width: 1 }, space: 36, size: 52, values: (u, splits) => splits.map(format) },
      ],
      series: [{}, ...series.map(each => ({
        label: each.title, stroke: color(each.color), width: 1.6, spanGaps: each.spans ?? each.sparse ?? false, points: each.sparse ? { show: true, size: 4, fill: color(each.color) } : { show: false },
        fill: each.fill ? `${color(each.color)}1c` : undefined,
      }))],
      hooks: { setCursor: [u => {
        const index = u.cursor.idx, box = tip.current;
        if (index == null || u.cursor.left < 0) { box.hidden = true; return; }
        box.hidden = false;
        box.replaceChildren(...[new Date(u.data[0][index] * 1000).toLocaleTimeString("en-GB",
          { timeZone: zone.peek() === "utc" ? "UTC" : undefined }),
        ...series.map((each, at) => `${each.title} ${format(u.data[at + 1][index])}`)].map(text =>
          Object.assign(document.createElement("div"), { textContent: text })));
        const left = u.cursor.left + 60;
        const isRight = left > node.clientWidth * 0.6;
        box.style.left = isRight ? "auto" : `${left + 10}px`;
        box.style.right = isRight ? `${node.clientWidth - left + 10}px` : "auto";
      }] },
    };
    plot.current = new uPlot(options, data, node);
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: node.clientWidth, height: node.clientHeight }));
    observer.observe(node);
    return () => { observer.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [dark, inZone]);
  useEffect(() => {
    plot.current?.setData(data);
  }, [data]);
  const says = series.map((each, at) => {
    const values = data[at + 1].filter(value => value != null);
    return values.length ? `${each.title}: now ${format(values.at(-1))}, at most ${format(Math.max(...values))}` : `${each.title}: no data`;
  }).join("; ");
  return html`<figure class="chart" role="img" aria-label=${`${label}, last hour. ${says}`}><div ref=${place} class="chart"></div>
    <div ref=${tip} class="chart-tip" hidden></div></figure>`;
};
