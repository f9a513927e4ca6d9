// Browsers start no worker for a page opened from the disk.  There the theme's search runs in a hidden frame instead,
// which loads the worker's script and exchanges messages with the page as a worker does.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.pending = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${new URL(url, location.href).href}"></script>`;
      this.frame.addEventListener("load", () => this.connect(this.frame.contentWindow));
      (document.body ?? document.documentElement).append(this.frame);
    }

    connect(inner) {
      this.inner = inner;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...urls) => {
        for (const url of urls)
          await new Promise((resolve, reject) => {
            const script = inner.document.createElement("script");
            Object.assign(script, { src: url, onload: resolve, onerror: reject });
            inner.document.head.append(script);
          });
      };
      this.pending.splice(0).forEach((data) => this.postMessage(data));
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new MessageEvent("message", { data }));
      else this.pending.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
