// Grafana fetches its icons as files from its server. There is none here, so they are part of the bundle.
import angleDown from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/angle-down.svg';
import apps from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/apps.svg';
import arrowDown from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/arrow-down.svg';
import arrowUp from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/arrow-up.svg';
import clock from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/clock-nine.svg';
import external from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/external-link-alt.svg';
import filter from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/filter.svg';
import info from '../node_modules/@grafana/ui/dist/public/img/icons/unicons/info-circle.svg';

const ICONS = {
  'angle-down': angleDown,
  apps,
  'arrow-down': arrowDown,
  'arrow-up': arrowUp,
  'clock-nine': clock,
  'external-link-alt': external,
  filter,
  'info-circle': info,
};

export function serveIcons() {
  window.fetch = async (address) => {
    const name = /([\w-]+)\.svg$/.exec(String(address?.url ?? address))?.[1];
    if (!ICONS[name]) {
      throw new TypeError(`nothing is fetched here: ${address}`);
    }
    return new Response(ICONS[name], { headers: { 'content-type': 'image/svg+xml' } });
  };
}
