// Everything works without this file but: the theme, keys, following a run, PNG export, the token inspector,
// and filters of pages that are files.
(() => {
  "use strict";
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const one = (selector, from = document) => from.querySelector(selector);

  // ---------------------------------------------------------------- theme
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const toggleTheme = () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("rollwright-theme", root.dataset.theme); } catch { /* not kept */ }
  };
  one("button.theme").addEventListener("click", toggleTheme);

  // ---------------------------------------------------------------- keys
  const keys = one("dialog.keys");
  one("button.help").addEventListener("click", () => keys.showModal());
  const steps = () => all("[data-step]").length ? all("[data-step]") : all("table.rows tbody tr").filter((row) => !row.hidden);
  let at = -1;
  const move = (by) => {
    const list = steps();
    if (!list.length) return;
    at = Math.min(Math.max(at + by, 0), list.length - 1);
    all(".at", one("main")).forEach((old) => old.tagName === "TR" && old.classList.remove("at"));
    const target = list[at];
    if (target.tagName === "TR") {
      target.classList.add("at");
      const link = one("a", target);
      if (link) link.focus({ preventScroll: true });
    } else target.focus({ preventScroll: true });
    target.scrollIntoView({ block: "nearest" });
    if (target.dataset.step !== undefined) target.scrollIntoView({ block: "start" });
  };
  let waiting = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
    if (event.target.closest("input:not([type=radio]):not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (waiting) {
      waiting = false;
      const target = one(`[data-go="${CSS.escape(event.key)}"]`);
      if (target) { event.preventDefault(); target.click(); }
      return;
    }
    switch (event.key) {
      case "j": move(1); break;
      case "k": move(-1); break;
      case "/": { const find = one("input[type=search]"); if (!find) return; find.focus(); find.select(); break; }
      case "?": keys.showModal(); break;
      case "g": waiting = true; break;
      case "d": toggleTheme(); break;
      case "[": { const link = one("a[rel=prev]"); if (link) link.click(); break; }
      case "]": { const link = one("a[rel=next]"); if (link) link.click(); break; }
      default: return;
    }
    event.preventDefault();
  });

  // ---------------------------------------------------------------- following a run
  const live = one(".live");
  let state = root.dataset.state;
  let fetching = false;
  let wanted = null;
  const refresh = async (next) => {
    wanted = next;
    if (fetching) return;
    fetching = true;
    while (wanted !== null && wanted !== state) {
      const target = wanted;
      try {
        const answer = await fetch(location.href, { cache: "no-store" });
        if (!answer.ok) break;
        const focused = document.activeElement && document.activeElement.closest("main a[href]");
        const href = focused && focused.getAttribute("href");
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of all("[data-live][id]", fresh)) {
          const mine = document.getElementById(part.id);
          if (mine && mine.innerHTML !== part.innerHTML) {
            const open = new Set(all("details[open]", mine).map((item) => all("details", mine).indexOf(item)));
            mine.replaceWith(document.adoptNode(part));
            all("details", part).forEach((item, place) => { if (open.has(place)) item.open = true; });
          }
        }
        if (href && !document.contains(focused)) {
          const again = one(`main a[href="${CSS.escape(href)}"]`);
          if (again) again.focus({ preventScroll: true });
          if (again && again.closest("tr")) again.closest("tr").classList.add("at");
        }
        const running = one("main .head .running");
        if (running && !one("main .head .running", fresh)) running.remove();
        state = fresh.documentElement.dataset.state;
        root.dataset.state = state;
        colour();
      } catch { break; }
      if (wanted === target) break;
    }
    fetching = false;
  };
  // A browser has six connections to a server: tabs in the background give theirs back.
  let source = null;
  const follow = () => {
    if (source || document.hidden) return;
    source = new EventSource(`events?state=${encodeURIComponent(state)}`);
    source.onopen = () => { live.hidden = false; live.classList.remove("lost"); live.textContent = "live"; };
    source.onerror = () => { live.classList.add("lost"); live.textContent = "not connected"; };
    source.onmessage = (message) => { if (message.data !== state) refresh(message.data); };
  };
  const rest = () => { if (source) source.close(); source = null; };
  if (live && state && window.EventSource) {
    follow();
    document.addEventListener("visibilitychange", () => (document.hidden ? rest() : follow()));
    addEventListener("pagehide", rest);
    addEventListener("pageshow", follow);
  }

  // ---------------------------------------------------------------- choosing two runs
  const compare = one("form[data-compare]");
  if (compare) {
    let chosen = [];
    const button = () => one("form[data-compare] button");
    document.addEventListener("change", (event) => {
      if (event.target.name !== "run") return;
      chosen = chosen.filter((name) => name !== event.target.value);
      if (event.target.checked) chosen.push(event.target.value);
      if (button()) button().disabled = chosen.length !== 2;
    });
    document.addEventListener("submit", (event) => {
      if (!event.target.matches("form[data-compare]")) return;
      event.preventDefault();
      const end = root.dataset.mode === "files" ? "index.html" : "";
      if (chosen.length === 2) location.href = `compare/${chosen.map(encodeURIComponent).join("/")}/${end}`;
    });
  }

  // ---------------------------------------------------------------- PNG
  const drawn = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "font-family", "font-size", "font-weight", "opacity"];
  const save = (svg, name) => {
    const copy = svg.cloneNode(true);
    const originals = [svg, ...all("*", svg)];
    [copy, ...all("*", copy)].forEach((element, place) => {
      const style = getComputedStyle(originals[place]);
      for (const property of drawn) element.setAttribute(property, style.getPropertyValue(property));
    });
    const box = svg.viewBox.baseVal;
    const scale = 1600 / box.width;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width * scale);
    copy.setAttribute("height", box.height * scale);
    const image = new Image();
    image.onload = () => {
      const pad = 40;
      const canvas = document.createElement("canvas");
      canvas.width = box.width * scale + 2 * pad;
      canvas.height = box.height * scale + 2 * pad;
      const pen = canvas.getContext("2d");
      pen.fillStyle = getComputedStyle(document.body).backgroundColor;
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, pad, pad);
      canvas.toBlob((blob) => {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = `${document.title.split(" · ")[0]} - ${name}.png`.replace(/[^\w .@()-]+/g, "_");
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      }, "image/png");
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.png");
    if (button) save(one("svg", button.closest("figure")), button.dataset.name);
  });

  // ---------------------------------------------------------------- tokens
  let mode = "loss";
  const colour = () => {
    const stream = one(".stream");
    if (!stream) return;
    stream.dataset.colour = mode;
    all(".key").forEach((key) => { key.hidden = key.dataset.for !== mode; });
    const radio = one(`input[name=mode][value=${mode}]`);
    if (radio) radio.checked = true;
  };
  document.addEventListener("change", (event) => {
    if (event.target.name === "mode") { mode = event.target.value; colour(); }
  });
  const row = (list, name, value) => {
    if (value === undefined || value === "") return;
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    list.append(term, text);
  };
  const inspect = (token) => {
    const panel = one(".inspector");
    if (!panel) return;
    const run = token.parentElement;
    const place = Number(run.dataset.start) + [...run.children].indexOf(token);
    const piece = document.createElement("p");
    piece.className = "piece";
    piece.textContent = token.textContent;
    const list = document.createElement("dl");
    row(list, "id", token.dataset.i);
    if (token.dataset.l !== undefined) {
      const logprob = Number(token.dataset.l);
      row(list, "logprob", token.dataset.l);
      row(list, "probability", Number.isFinite(logprob) ? `${(100 * Math.exp(logprob)).toPrecision(3)} %` : "none");
    }
    row(list, "turn", token.closest("[data-turn]").dataset.turn);
    row(list, "position", place.toLocaleString("en"));
    row(list, "version", run.dataset.version);
    row(list, "loss", run.classList.contains("trained") ? "trained" : run.dataset.reason ? `left out: ${run.dataset.reason}` : "prompt");
    panel.replaceChildren(piece, list);
  };
  let held = null;
  const hold = (token) => {
    if (held) held.classList.remove("at");
    held = token;
    if (token) { token.classList.add("at"); inspect(token); token.scrollIntoView({ block: "nearest" }); }
  };
  document.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".ids b");
    if (token && !held) inspect(token);
  });
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".ids b");
    if (token) hold(token === held ? null : token);
  });
  document.addEventListener("keydown", (event) => {
    const article = event.key === "ArrowRight" && !held && document.activeElement.closest(".tokens");
    if (article) {
      hold(one(".run.trained b, .run.excluded b", article) || one(".ids b", article));
      event.preventDefault();
      return;
    }
    if (!held || (event.key !== "ArrowRight" && event.key !== "ArrowLeft")) { if (event.key === "Escape") hold(null); return; }
    const tokens = all(".ids b");
    const next = tokens[tokens.indexOf(held) + (event.key === "ArrowRight" ? 1 : -1)];
    if (next) hold(next);
    event.preventDefault();
  });

  // ---------------------------------------------------------------- filter and sort of pages that are files
  const table = one("table[data-sortable]");
  if (root.dataset.mode === "files" && table) {
    const query = new URLSearchParams(location.search);
    const rows = all("tbody tr", table);
    const words = (query.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const line of rows) {
      const exact = ["task", "group", "status", "error", "stage", "kind", "drift"].every((name) => !query.get(name) || !(name in line.dataset) || line.dataset[name] === query.get(name));
      const text = line.textContent.toLowerCase();
      line.hidden = !exact || !words.every((word) => text.includes(word));
      shown += !line.hidden;
    }
    const counted = one("[data-counted]");
    if (counted && shown !== rows.length) counted.textContent = `${shown.toLocaleString("en")} of ${counted.textContent}`;
    const order = query.get("sort");
    if (order) {
      const down = order.startsWith("-");
      const heading = all("thead th", table).find((cell) => cell.dataset.key === order.replace(/^-/, ""));
      if (heading) {
        const column = [...heading.parentElement.children].indexOf(heading);
        all("thead th", table).forEach((cell) => cell.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (line) => { const cell = line.children[column]; return cell.dataset.v ?? cell.textContent.trim(); };
        const compared = (a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x === "" || y === "") return (x === "") - (y === "");
          const both = x !== "" && y !== "" && !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
          const result = both ? Number(x) - Number(y) : x.localeCompare(y);
          return down ? -result : result;
        };
        rows.sort(compared).forEach((line) => line.parentElement.append(line));
      }
    }
    for (const cell of all("thead th[data-key] a", table)) {
      const next = new URLSearchParams(location.search);
      const key = cell.parentElement.dataset.key;
      next.set("sort", order === `-${key}` ? key : order === key ? `-${key}` : `-${key}`);
      cell.href = `?${next}`;
    }
    for (const field of all("form[data-filter] [name]")) {
      if (!query.has(field.name)) continue;
      if (field.type === "checkbox") field.checked = query.get(field.name) === field.value;
      else field.value = query.get(field.name);
      field.closest("label").hidden = false;
    }
  }
})();
