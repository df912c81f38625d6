// Puts the charts of chart.js into the page, moves through pictures, and, where the page is served, keeps it up to
// date.
// ---- all charts

function showCharts() {
  const groups = new Map([...document.querySelectorAll("[data-group]")].map((one) => [one.dataset.group, one]));
  const present = new Set(data.charts.map((chart) => chart.key));
  for (const [key, view] of views) if (!present.has(key)) { view.element.remove(); views.delete(key); }
  for (const chart of data.charts) {
    const view = views.get(chart.key);
    if (view) view.update(chart);
    else views.set(chart.key, new View(chart));
  }
  for (const [name, group] of groups) {
    const wanted = data.charts.filter((chart) => chart.group === name).map((chart) => views.get(chart.key).element);
    // Moved only where the order is another, since moving takes the focus away.
    if (wanted.length !== group.children.length || wanted.some((one, index) => one !== group.children[index])) group.replaceChildren(...wanted);
    document.querySelector(`[data-missing="${name}"]`).hidden = wanted.length > 0;
    for (const element of wanted) watcher.observe(element);
  }
  bar.element.hidden = bar.hint.hidden = !data.charts.length || Boolean(data.apart);
  redraw();
}
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const view = views.get(target.dataset.chart);
    if (view && view.drawnWidth !== view.plot.clientWidth) { view.drawnWidth = view.plot.clientWidth; view.draw(); }
  }
});

// ---- pictures over time

let playing = null;
function bindTimeline(part) {
  const box = part.querySelector(".timeline");
  if (!box) return;
  const steps = JSON.parse(box.dataset.steps), slider = box.querySelector("input"), play = box.querySelector("button");
  const show = () => {
    const step = steps[slider.value];
    box.querySelector("output").textContent = spokenStep(step);
    slider.setAttribute("aria-valuetext", `step ${spokenStep(step)}`);
    for (const figure of part.querySelectorAll(".emergence figure")) showStep(figure, step);
  };
  const stop = () => { clearInterval(playing); playing = null; play.textContent = "Play"; };
  stop();
  box.hidden = steps.length < 2;
  slider.addEventListener("input", show);
  play.addEventListener("click", () => {
    if (playing) return stop();
    if (Number(slider.value) === steps.length - 1) slider.value = -1;
    play.textContent = "Pause";
    playing = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      show();
      if (Number(slider.value) === steps.length - 1) stop();
    }, 400);
    show();
  });
  for (const item of part.querySelectorAll(".film li")) item.addEventListener("click", () => {
    slider.value = steps.indexOf(Number(item.dataset.step));
    show();
  });
  show();
}
// The picture of this step, or the one before it where this image has none.
function showStep(figure, step) {
  const items = [...figure.querySelectorAll(".film li")];
  const chosen = items.filter((item) => Number(item.dataset.step) <= step).pop() || items[0];
  items.forEach((item) => item.classList.toggle("chosen", item === chosen));
  const current = figure.querySelector(".current"), found = Number(chosen.dataset.step);
  current.src = chosen.querySelector("img").src;
  current.alt = current.alt.replace(/[\d,]+$/, spokenStep(found));
  figure.querySelector(".when").textContent = `step ${spokenStep(found)}`;
  const film = chosen.parentElement;
  film.scrollLeft = chosen.offsetLeft - film.offsetLeft - (film.clientWidth - chosen.clientWidth) / 2;
}

// ---- staying up to date

const banner = document.getElementById("banner");
const live = settings.live;
async function ask(path) {
  const answer = await fetch(live.base + path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}
async function refresh() {
  const digests = await ask("/parts");
  for (const name of Object.keys(digests)) if (digests[name] !== live.digests[name]) {
    const part = await ask(`/part/${name}`);
    if (part.charts) {
      data = part.charts;
      showCharts();
    } else replace(document.querySelector(`[data-part="${name}"]`), part.html);
    live.digests[name] = part.digest;
  }
}
// What was open stays open, and the slider where it was unless it stood at the end.
function replace(element, html) {
  const open = [...element.querySelectorAll("details")].map((one) => one.open);
  const slider = element.querySelector(".timeline input");
  const kept = slider && slider.value !== slider.max ? slider.value : null;
  element.innerHTML = html;
  element.querySelectorAll("details").forEach((one, index) => { one.open = Boolean(open[index]); });
  const anew = element.querySelector(".timeline input");
  if (anew && kept !== null) anew.value = kept;
  bindTimeline(element);
}
async function stayFresh() {
  if (!document.hidden) try {
    await refresh();
    banner.hidden = true;
  } catch (error) {
    const reason = error instanceof TypeError ? "The server does not answer" : error.message;
    banner.textContent = `${reason}. Shown is what was there before.`;
    banner.hidden = false;
  }
  setTimeout(stayFresh, live.seconds * 1000);
}

document.querySelector(".zoomed")?.prepend(bar.hint, bar.element);
showCharts();
document.querySelectorAll("[data-part]").forEach(bindTimeline);
if (live) setTimeout(stayFresh, live.seconds * 1000);
