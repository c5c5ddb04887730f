// Rates, latency, load and KV over the last five minutes, drawn by uPlot (global `uPlot`, see uplot/).

import { clock, h, milliseconds, percent, rate } from "./dom.js";

const HEIGHT_PX = 150;

/** Each chart's lines: name, colour (a variable of app.css), value of a second of history. */
const CHARTS = [
  {
    title: "requests per second",
    format: rate,
    lines: [["answered", "--decode", (row) => row.requests], ["failed", "--error", (row) => row.failed]],
  },
  {
    title: "tokens per second",
    format: rate,
    lines: [["answers", "--decode", (row) => row.tokens], ["prompts", "--prefill", (row) => row.prompt_tokens]],
  },
  {
    title: "time to first token",
    format: milliseconds,
    lines: [["p50", "--prefill", (row) => row.ttft_p50_ms], ["p95", "--warning", (row) => row.ttft_p95_ms]],
  },
  {
    title: "time between tokens",
    format: milliseconds,
    lines: [["p50", "--prefill", (row) => row.itl_p50_ms], ["p95", "--warning", (row) => row.itl_p95_ms]],
  },
  {
    title: "requests in workers",
    format: rate,
    lines: [["running", "--decode", (row) => row.running], ["waiting", "--warning", (row) => row.waiting]],
  },
  {
    title: "KV in use",
    format: (value) => percent(value ?? 0, 1),
    top: 1,
    lines: [["in use", "--both", (row) => (row.kv_total ? row.kv_used / row.kv_total : null)]],
  },
];

export function charts(section) {
  const room = h("div", { class: "charts" });
  section.append(room);
  let drawn = [];
  const redraw = () => {
    drawn.forEach(({ plot }) => plot.destroy());
    drawn = [];
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  function draw() {
    room.replaceChildren();
    drawn = CHARTS.map((chart) => {
      const figure = h("figure", {}, h("figcaption", {}, chart.title));
      room.append(figure);
      return { figure, chart, plot: makePlot(figure, chart) };
    });
  }

  new ResizeObserver(() => {
    for (const { figure, plot } of drawn) plot.setSize({ width: figure.clientWidth, height: HEIGHT_PX });
  }).observe(room);

  return ({ snapshot, history }) => {
    if (!snapshot || history.size < 2) return false;
    section.hidden = false;
    if (!drawn.length) draw();
    const seconds = [...history.keys()].sort((one, other) => one - other);
    for (const { chart, plot } of drawn) {
      const columns = chart.lines.map(([, , value]) => seconds.map((second) => value(history.get(second))));
      plot.setData([seconds, ...columns]);
    }
    return true;
  };
}

function makePlot(figure, { lines, format, top }) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const options = {
    width: figure.clientWidth,
    height: HEIGHT_PX,
    cursor: { y: false, sync: { key: "kvrelay" } },
    scales: { y: { range: (plot, low, high) => [0, top ?? (Math.max(high ?? 0, 0) * 1.1 || 1)] } },
    axes: [
      { ...axis, space: 70, size: 26, values: (plot, ticks) => ticks.map(clock) },
      { ...axis, size: 62, values: (plot, ticks) => ticks.map(format) },
    ],
    series: [
      { label: "at", value: (plot, second) => (second === null ? "–" : clock(second)) },
      ...lines.map(([label, name]) => ({
        label,
        stroke: colour(name),
        width: 1.5,
        points: { show: false },
        value: (plot, value) => (value === null ? "–" : format(value)),
      })),
    ],
  };
  return new uPlot(options, [[], ...lines.map(() => [])], figure);
}
